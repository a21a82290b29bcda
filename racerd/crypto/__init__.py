"""Sealing and opening of frames, and the keyring."""
