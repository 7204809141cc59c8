"""values: the engine: a model whose attention history is staged layer by layer from host memory."""
