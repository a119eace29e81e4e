"""Models of other families, in and out: their files, key maps and tokenizers. `sinkdlm.interop` is its face for users."""
