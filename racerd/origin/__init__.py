"""Where objects really live: S3, Azure Blob, GCS, HTTP(S), a local directory."""
