"""Run llama.cpp's own converter, unmodified: a checkpoint's directory to a GGUF file.

    python load_tests/peers/convert.py LLAMA_CPP DIRECTORY --outfile FILE --outtype bf16

The converter recognises only known pre-tokenizers; for others this program names GPT-2's, which has no effect on the weights.
"""

import sys
from pathlib import Path

CUTS_AS = "gpt-2"


def main() -> None:
    tree = Path(sys.argv[1])
    sys.path[:0] = [str(tree), str(tree / "gguf-py")]
    import convert_hf_to_gguf
    from conversion.base import TextModel

    known = TextModel.get_vocab_base_pre

    def named(self: object, tokenizer: object) -> str:
        try:
            return str(known(self, tokenizer))
        except NotImplementedError:
            return CUTS_AS

    TextModel.get_vocab_base_pre = named
    sys.argv[1:] = sys.argv[2:]
    convert_hf_to_gguf.main()


if __name__ == "__main__":
    main()
