"""Token ids in, token ids out.

The client half (protocol, client, tokenizer, chat_template, formats) imports without
torch."""
