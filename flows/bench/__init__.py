"""Benchmarks side by side with the peers, both in one run on one machine; figures are ratios, ours to the peer's.

The peers' scripts in `peers/` run in `.venv-peers` (made by `make bench`) and import nothing of mindtune.
"""
