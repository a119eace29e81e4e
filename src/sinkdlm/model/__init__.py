"""The paper: a diffusion language model whose sinks run as a lane beside the tokens, in plain torch."""
