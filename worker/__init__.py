"""shell: a worker process: session, tokenizer and engine threads that end together (S2)."""
