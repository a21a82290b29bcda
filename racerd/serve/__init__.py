"""I/O drivers: the client socket of each cache and the diagnostics HTTP server."""
