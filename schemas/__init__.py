"""What the parts say to each other: configuration, tables, manifests, reports and errors.

Nothing here imports Prefect or MindSpore, so that a wrong configuration is refused at once.
"""
