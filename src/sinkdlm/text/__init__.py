"""Prompts and chats in, text out: between a tokenizer and the samplers."""
