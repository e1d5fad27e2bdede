"""How each stage works.

the stages      validate_env  tokenize  train  merge  export  evaluate: one module each, with `run(job, context)`
their contract  stages: what each depends on, and what it may ask of its runner
what is kept    store: artifacts and runs; plan: keys, decisions, reasons; fingerprint, code: digests of inputs and
                code; files: writing that survives a crash
the base model  locations: from the text in the configuration to a path; hubs; tokenizer_files, gguf_tokenizer
how they run    runner, child: a stage in a process of its own; cached: the six Prefect tasks
tokenize        workers: many processes, results in order
validate_env    environment, probe
train           training: the loop; batches, schedule, checkpoints, step_clock
evaluate        scoring, memory, report, plots, report.html.j2
generate        answer, with data/decoding: text as its tokens come
data check      data_check: what would be trained on, without running a stage
data/           files to records: sources, containers, formats, readers, mixing; first_look: what is refused early;
                records to rows: templates, chat_template, encoding, masks, proof, making, segments, packing, shards:
                no Prefect, no MindSpore
models/         nn.Cell code, weights, adapters, generation: no Prefect, no store
"""
