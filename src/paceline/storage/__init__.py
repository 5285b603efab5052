"""Object storage through fsspec: addresses, files that are sent whole or in parts, bounded retries. No torch here."""
