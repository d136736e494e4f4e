"""Other backbones: models of timm (`--encoder timm:NAME`) with their weights, and any module of the user.

module wraps a module as an encoder (`encoders.from_module`). timm_models makes the models and fetches the weights that
are named `timm:NAME`. module_format is the weight format of both. other_names suggests encoders for the names of other
projects. The page is docs/backbones.md.
"""
