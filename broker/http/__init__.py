"""values: OpenAI's files and batches endpoints over HTTP: a process of its own that speaks the client's protocol."""
