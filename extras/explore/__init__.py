"""Look at images through an encoder: copies, leaks, outliers, doubtful labels, clusters. Page: docs/explore.md.

- `findings`: the findings about all images, in memory and as findings.parquet.
- `thumbnails`: small JPEGs of all images in one file.
"""
