"""Reading records, making prompts and answers of them, and token shards: plain functions, no Prefect, no MindSpore."""
