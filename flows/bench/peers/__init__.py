"""Scripts that run in `.venv-peers` and import nothing of mindtune."""
