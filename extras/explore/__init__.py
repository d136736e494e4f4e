"""Look at images through an encoder: copies, leaks, outliers, doubtful labels, a map. Page: docs/explore.md.

- `explore`: the command `tessera explore`.
- `embedding`: features, facts and thumbnails of all images, in parts.
- `neighbours`: the most similar images, searched with faiss.
- `copies`: near-copies, and the threshold of their margin.
- `planting`: copies made on purpose, on which recall is measured.
- `checks`: outliers, blank images, tiny files, doubtful labels, clusters.
- `findings`: the findings in memory. `tables`: as Parquet files and as text.
- `thumbnails`: small JPEGs of all images in one file.
- `page`: the map of all images, which a browser opens from a file.
"""
