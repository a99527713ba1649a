"""Commands for models' files: pull, pack, quantize, plan, adapters."""
