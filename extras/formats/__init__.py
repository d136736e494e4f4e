"""Weights of other projects: published files, recognised by the names and shapes of their tensors.

vit, rope_vit, swin, twins, navit and sam_vit are the formats of the families (`encoders.weight_files.Format`). Each
converts weights to the tensor names of this project, resizes tables to the encoder, describes the encoder that fits
given weights, and converts an encoder to timm. names has the tensor names of other projects, conversion the functions
that formats share. The page is docs/encoders.md, "Weights in and out".
"""
