"""Tiny random checkpoints with vision towers, images of awkward sizes, and the results of `transformers` for these."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageTextToText,
    DeepseekV3Config,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4TextConfig,
    Glm4vConfig,
    Glm4vMoeConfig,
    Glm46VConfig,
    Kimi_K25Config,
    Kimi_K25ForConditionalGeneration,
    Llama4Config,
    Llama4ForConditionalGeneration,
    Llama4TextConfig,
    Mistral3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from pilotlight.engine.api.protocol import PromptImage
from pilotlight.engine.description.image_sizes import (
    FilledImages,
    ImageSizes,
    RowedImages,
    ScaledImages,
    SquareImages,
    TiledImages,
    read_image_sizes,
)
from pilotlight.engine.text.image_prompt import ImagePlaceholders, SizedImage
from pilotlight.engine.vision.picture import prepare_image
from tests.checkpoints import AWKWARD
from tests.engine.families import DELTA, LATENT, YARN, config

PLACEHOLDER, MARKER = 9, 5  # token ids; only Llama 4 and Gemma 3 have a marker other than their placeholder
TOKENS = {
    "<|image|>": 5,
    "<|image_start|>": 6,
    "<|image_end|>": 7,
    "<|tile_x_separator|>": 3,
    "<|tile_y_separator|>": 4,
    "[IMG_BREAK]": 3,
    "[IMG_END]": 4,
    "<start_of_image>": 5,
    "<end_of_image>": 7,
}
FAMILIES = (
    "llama 4",
    "kimi k2.5",
    "qwen 2.5 vl",
    "qwen 3 vl",
    "qwen 3 vl, experts",
    "qwen 3.5",
    "mistral 3",
    "glm 4.1 v",
    "llama 4, five heads over one, two experts, biased",
    "kimi k2.5, five heads, no groups",
    "qwen 2.5 vl, three heads over one, tied",
    "qwen 3 vl, three heads over one, tied",
    "qwen 3 vl, experts, three heads over one, a dense layer, tied",
    "qwen 3.5, four heads over one, attention first, tied",
    "mistral 3, three heads over one, queries grow, tied",
    "glm 4.5 v, experts, three heads over one",
    "qwen 3.5, experts",
    "qwen 3.5, experts, four heads over one, attention first, tied",
    "glm 4.6 v",
    "glm 4.6 v, experts, three heads over one",
    "gemma 3, windows but in layer 2",
    "gemma 3, one kv head, tied",
    "gemma 4, keys are values",
    "gemma 4, one kv head, clipped, causal, tied",
    "gemma 4, inputs of layers, shared keys, clipped, causal",
)
# Checkpoints whose images' tokens attend to each other.
WHOLE = tuple(name for name in FAMILIES if name.startswith("gemma") and "causal" not in name)
# Checkpoints that two ranks can share.
DIVISIBLE = (
    *(name for name in FAMILIES[:8] if name != "qwen 3.5"),
    "qwen 3.5, four heads over one, attention first, tied",
    "gemma 3, windows but in layer 2",
)


class VisionCheckpoint(NamedTuple):
    """A written checkpoint and its model."""

    directory: Path
    model: PreTrainedModel
    sizes: ImageSizes

    def prompt(self, token_ids: list[int], *files: bytes) -> tuple[list[int], tuple[PromptImage, ...]]:
        """Return the prompt of `token_ids`, in which -1 marks an image, and its images."""
        placeholders = ImagePlaceholders.from_checkpoint(self.directory, TOKENS.get)
        assert placeholders is not None
        marker = MARKER if isinstance(self.sizes, TiledImages | SquareImages) else PLACEHOLDER
        images = [SizedImage(*Image.open(io.BytesIO(file)).size, digest(file), file) for file in files]
        # Models that rotate images by row and column have tokens around each image in their templates.
        around = [6, marker, 7] if isinstance(self.sizes, ScaledImages) else [marker]
        laid, placed = placeholders.expand(
            [each for token in token_ids for each in (around if token == -1 else [token])], images
        )
        return list(laid), placed

    def with_images(self, *files: bytes) -> "ModelWithImages":
        pieces = [piece for file in files for piece in prepare_image(file, self.sizes).pieces]
        if isinstance(self.sizes, ScaledImages):
            grids = torch.tensor([[1, *piece.shape[:2]] for piece in pieces])
            squares = torch.cat([_in_squares(piece.float()) for piece in pieces])
            return ModelWithImages(self.model, {"pixel_values": squares, "image_grid_thw": grids})
        patch = self.sizes.patch_size
        if isinstance(self.sizes, RowedImages):
            return ModelWithImages(self.model, _padded(pieces))
        if isinstance(self.sizes, FilledImages):
            return ModelWithImages(self.model, _filled(pieces, self.sizes.most_tokens * self.sizes.merge**2))
        shapes = [piece.shape[:2] for piece in pieces]
        cut = [piece.float().reshape(-1, 3, patch, patch) for piece in pieces]
        if isinstance(self.sizes, TiledImages | SquareImages):
            whole = [
                patches.view(rows, columns, 3, patch, patch).permute(2, 0, 3, 1, 4).reshape(3, rows * patch, -1)
                for patches, (rows, columns) in zip(cut, shapes, strict=True)
            ]
            return ModelWithImages(self.model, {"pixel_values": torch.stack(whole)})
        grids = torch.tensor([[1, rows, columns] for rows, columns in shapes])
        return ModelWithImages(self.model, {"pixel_values": torch.cat(cut), "image_grid_thw": grids})


class ModelWithImages(NamedTuple):
    """The reference model as a function of token ids, with fixed images."""

    model: PreTrainedModel
    inputs: dict[str, torch.Tensor]

    def __call__(self, token_ids: torch.Tensor, **options: Any) -> Any:
        given = {**self.inputs, **options}
        if self.model.config.model_type.startswith(("qwen", "glm", "gemma4")):
            return self.model(token_ids, mm_token_type_ids=(token_ids == PLACEHOLDER).int(), **given)
        if self.model.config.model_type == "gemma3":
            return self.model(token_ids, token_type_ids=(token_ids == PLACEHOLDER).int(), **given)
        return self.model(token_ids, **given)


def _padded(pieces: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the inputs of Pixtral's processor for images: all padded to the largest size."""
    wholes = [piece.float().unflatten(2, (3, 6, 6)).permute(2, 0, 3, 1, 4).flatten(3).flatten(1, 2) for piece in pieces]
    sizes = torch.tensor([whole.shape[1:] for whole in wholes])
    height, width = sizes.amax(0).tolist()
    padded = [torch.nn.functional.pad(one, (0, width - one.shape[2], 0, height - one.shape[1])) for one in wholes]
    return {"pixel_values": torch.stack(padded), "image_sizes": sizes}


def _filled(pieces: list[torch.Tensor], most: int) -> dict[str, torch.Tensor]:
    """Return the inputs of Gemma 4's processor for images: patches with all colours of a pixel together, padded to `most`, and their places."""
    pixels, places = [], []
    for piece in pieces:
        rows, columns, _ = piece.shape
        patches = (piece.float() / 2 + 0.5).view(rows * columns, 3, -1).transpose(1, 2).flatten(1)
        at = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1)
        pad = (0, 0, 0, most - rows * columns)
        pixels.append(torch.nn.functional.pad(patches, pad))
        places.append(torch.nn.functional.pad(at, pad, value=-1))
    return {"pixel_values": torch.stack(pixels), "image_position_ids": torch.stack(places)}


def _in_squares(patches: torch.Tensor) -> torch.Tensor:
    """Return patches [rows, columns, 3 * 36] in the order of Qwen's processor: in squares of four, each patch twice, as two frames."""
    rows, columns, _ = patches.shape
    squares = patches.view(rows // 2, 2, columns // 2, 2, 3, 1, 36).transpose(1, 2)
    return squares.expand(-1, -1, -1, -1, -1, 2, -1).reshape(rows * columns, -1)


def digest(file: bytes) -> bytes:
    import hashlib

    return hashlib.sha256(file).digest()


def picture(width: int, height: int, seed: int = 0, kind: str = "PNG", mode: str = "RGB") -> bytes:
    """Return an image file with random colours in coarse squares."""
    generator = torch.Generator().manual_seed(seed)
    channels = {"L": 1, "RGB": 3, "RGBA": 4}[mode]
    coarse = torch.rand(1, channels, 1 + height // 5, 1 + width // 5, generator=generator)
    pixels = torch.nn.functional.interpolate(coarse, (height, width), mode="nearest")[0]
    pixels = (pixels * 255).byte().permute(1, 2, 0).squeeze(-1).contiguous()
    file = io.BytesIO()
    Image.frombytes(mode, (width, height), bytes(pixels.flatten().tolist())).save(file, kind)
    return file.getvalue()


def write_vision(directory: Path, name: str, seed: int = 0) -> VisionCheckpoint:
    """Write a checkpoint of awkward sizes with a vision tower."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = _MAKERS[name]().float().eval()
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "norm" in key:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
                elif (
                    key.endswith(("bias", "mm_input_projection_weight", "position_embedding_table"))
                    or "position_embeddings" in key
                    or "pos_embed" in key
                ):
                    parameter.copy_(torch.randn_like(parameter) * 0.2)
            model.get_output_embeddings().weight[PLACEHOLDER] = (
                0.0  # never sampled: the reference would expect an image
            )
            for key, buffer in model.named_buffers():
                if key.endswith(("e_score_correction_bias", "std_bias", "std_scale")):
                    buffer.copy_(torch.randn_like(buffer) * 0.2)
                elif key.endswith(("_min", "_max")):  # near enough to clip some numbers
                    bound = 0.5 + torch.rand(())
                    buffer.copy_(bound if key.endswith("_max") else -bound)
    model.save_pretrained(directory)
    described = json.loads((directory / "config.json").read_text())
    if name.startswith("glm"):
        described_size = {"size": {"shortest_edge": 1152, "longest_edge": 4608}}
        (directory / "preprocessor_config.json").write_text(json.dumps(described_size))
    elif name.startswith("qwen"):
        (directory / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 576, "max_pixels": 2304}))
    elif name.startswith("mistral 3"):
        (directory / "preprocessor_config.json").write_text(json.dumps({"size": {"longest_edge": 60}}))
    elif name.startswith("gemma 4"):
        (directory / "preprocessor_config.json").write_text(json.dumps({"max_soft_tokens": 11}))
    elif name.startswith("kimi k2.5"):
        _rename(directory)
        described["architectures"] = ["KimiK25ForConditionalGeneration"]
        (directory / "preprocessor_config.json").write_text(json.dumps({"max_patches": 40, "size": {"max_height": 9}}))
    else:
        (directory / "preprocessor_config.json").write_text(json.dumps({"max_patches": 5}))
    (directory / "config.json").write_text(json.dumps(described))
    sizes = read_image_sizes(directory)
    assert sizes is not None
    return VisionCheckpoint(directory, model, sizes)


# Prefixes of names as `transformers` saves them, and those of the published checkpoint of Kimi K2.5.
SAVED_NAMES = {
    "language_model.model.blocks.": "language_model.model.layers.",
    "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
    "model.mm_projector.": "mm_projector.",
}


def _rename(directory: Path) -> None:
    tensors = {}
    for key, tensor in load_file(directory / "model.safetensors").items():
        prefix = next((saved for saved in SAVED_NAMES if key.startswith(saved)), "")
        tensors[SAVED_NAMES.get(prefix, "") + key.removeprefix(prefix)] = tensor
    save_file(tensors, directory / "model.safetensors")


def _llama4(vision: dict[str, Any], joined: int, **text: Any) -> PreTrainedModel:
    """Return a model; `joined`: the size after each projection of its tower."""
    described = config(
        Llama4TextConfig, intermediate_size=30, intermediate_size_mlp=57, num_hidden_layers=4, floor_scale=9, attn_scale=0.3, **text
    )  # fmt: skip
    vision = vision | {
        "image_size": 56, "patch_size": 14, "projector_input_dim": joined, "projector_output_dim": joined, "vision_output_dim": joined,
        "initializer_range": 0.15,
    }  # fmt: skip
    whole = Llama4Config(
        text_config=described.to_dict(), vision_config=vision, image_token_index=PLACEHOLDER, tie_word_embeddings=False
    )
    whole.eos_token_id = 1
    return Llama4ForConditionalGeneration._from_config(whole)


def _kimi(hidden: int, heads: int, side: int, **text: Any) -> PreTrainedModel:
    """Return a model; `hidden`, `heads`, `side`: its tower's hidden size, heads, and learned positions in a row."""
    described = config(
        DeepseekV3Config, **{**LATENT, "n_routed_experts": 12, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, **text}
    )  # fmt: skip
    vision = {
        "hidden_size": hidden, "num_attention_heads": heads, "num_hidden_layers": 2, "intermediate_size": 50, "patch_size": 6,
        "pos_emb_height": side, "pos_emb_width": side, "initializer_range": 0.15,
        "rope_parameters": {"rope_type": "axial", "rope_theta": 10_000.0},
    }  # fmt: skip
    whole = Kimi_K25Config(
        text_config=described.to_dict(),
        vision_config=vision,
        projection_hidden_size=hidden,
        image_token_id=PLACEHOLDER,
        tie_word_embeddings=False,
    )
    whole.eos_token_id = 1
    return Kimi_K25ForConditionalGeneration._from_config(whole)


_IDS = {"image_token_id": PLACEHOLDER, "video_token_id": 421, "vision_start_token_id": 422, "vision_end_token_id": 423}
_TOWER = {
    "depth": 3, "hidden_size": 24, "intermediate_size": 50, "num_heads": 2, "patch_size": 6, "initializer_range": 0.15,
}  # fmt: skip


def _qwen(kind: Callable[..., PreTrainedConfig], vision: dict[str, Any], **text: Any) -> PreTrainedModel:
    keys = {key: value for key, value in (AWKWARD | {"num_hidden_layers": 4} | text).items() if value is not None}
    tied = keys["tie_word_embeddings"]
    whole = kind(text_config=keys, vision_config=_TOWER | vision, tie_word_embeddings=tied, **_IDS)
    whole.eos_token_id = whole.text_config.eos_token_id = 1
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(whole)
    return model


def _rows_and_columns(*sections: int, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": list(sections), **more}


def _mistral(kind: str, heads: int, activation: str, **text: Any) -> PreTrainedModel:
    """Return a model; `heads`, `activation`: those of its tower."""
    vision = {
        "model_type": "pixtral", "hidden_size": 24, "intermediate_size": 50, "num_hidden_layers": 2, "num_attention_heads": heads,
        "head_dim": 24 // heads, "image_size": 60, "patch_size": 6, "hidden_act": activation, "initializer_range": 0.15,
    }  # fmt: skip
    keys = AWKWARD | {"model_type": kind, "sliding_window": None} | text
    whole = Mistral3Config(
        text_config=keys,
        vision_config=vision,
        image_token_index=PLACEHOLDER,
        multimodal_projector_bias=activation == "gelu",
        tie_word_embeddings=keys["tie_word_embeddings"],
    )
    whole.eos_token_id = 1
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(whole)
    return model


def _gemma3(vision: dict[str, Any], num_tokens: int, **text: Any) -> PreTrainedModel:
    """Return a model; `num_tokens`: the number of tokens of an image."""
    described = config(Gemma3TextConfig, hidden_activation="gelu_pytorch_tanh", **text)
    tower = {"num_hidden_layers": 2, "intermediate_size": 50, "patch_size": 6, "vision_use_head": False}
    whole = Gemma3Config(
        text_config=described.to_dict(),
        vision_config=tower | vision,
        mm_tokens_per_image=num_tokens,
        image_token_index=PLACEHOLDER,
        boi_token_index=MARKER,
        eoi_token_index=TOKENS["<end_of_image>"],
        initializer_range=0.15,
        tie_word_embeddings=described.tie_word_embeddings,
    )
    whole.eos_token_id = 1
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(whole)
    return model


def _gemma4(vision: dict[str, Any], **text: Any) -> PreTrainedModel:
    fields = {"hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 0} | text
    described = config(Gemma4TextConfig, **fields)
    tower = {
        "num_hidden_layers": 2,
        "intermediate_size": 50,
        "patch_size": 6,
        "pooling_kernel_size": 2,
        "position_embedding_size": 30,
    }
    whole = Gemma4Config(
        text_config=described.to_dict(),
        vision_config=tower | vision,
        audio_config=None,
        image_token_id=PLACEHOLDER,
        boi_token_id=MARKER,
        eoi_token_id=TOKENS["<end_of_image>"],
        video_token_id=1000,  # outside the vocabulary, so that none is ever sampled
        audio_token_id=1001,
        initializer_range=0.15,
        tie_word_embeddings=described.tie_word_embeddings,
    )
    whole.eos_token_id = 1
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(whole)
    return model


_SQUARE = {"num_position_embeddings": 9, "out_hidden_size": AWKWARD["hidden_size"]}
_DEEP = _SQUARE | {"deepstack_visual_indexes": [0, 2]}
_ONE: dict[str, Any] = {"num_attention_heads": 3, "num_key_value_heads": 1}
_MAKERS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama 4": lambda: _llama4(
        {
            "hidden_size": 24,
            "num_attention_heads": 3,
            "num_hidden_layers": 2,
            "intermediate_size": 96,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        },
        joined=22,
        num_local_experts=5,
        no_rope_layers=[1, 0, 1, 1],
        moe_layers=[0, 1, 3],
        attention_chunk_size=16,
    ),
    "gemma 4, inputs of layers, shared keys, clipped, causal": lambda: _gemma4(
        {
            "hidden_size": 24,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "use_clipped_linears": True,
        },
        num_hidden_layers=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=6,
        vocab_size_per_layer_input=440,
        pad_token_id=3,
        sliding_window=11,
        global_head_dim=16,
        rope_parameters=None,
        tie_word_embeddings=True,
    ),
    "llama 4, five heads over one, two experts, biased": lambda: _llama4(
        {"hidden_size": 40, "num_attention_heads": 5, "num_hidden_layers": 3, "intermediate_size": 160},
        joined=26,
        num_attention_heads=5,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
        interleave_moe_layer_step=2,
        no_rope_layer_interval=3,
        attention_chunk_size=23,
        attention_bias=True,
        use_qk_norm=False,
    ),
    "kimi k2.5": lambda: _kimi(32, 2, 4, first_k_dense_replace=1),
    "kimi k2.5, five heads, no groups": lambda: _kimi(
        36,
        3,
        3,
        num_attention_heads=5,
        num_key_value_heads=5,
        v_head_dim=16,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=0,
    ),
    "qwen 2.5 vl": lambda: _qwen(
        Qwen2_5_VLConfig,
        {"window_size": 24, "fullatt_block_indexes": [1], "out_hidden_size": 60},
        head_dim=None,
        hidden_size=60,
        rope_parameters=_rows_and_columns(2, 2, 1),
    ),
    "qwen 2.5 vl, three heads over one, tied": lambda: _qwen(
        Qwen2_5_VLConfig,
        {"num_heads": 3, "window_size": 36, "fullatt_block_indexes": [0], "out_hidden_size": 48},
        **_ONE,
        head_dim=None,
        hidden_size=48,
        tie_word_embeddings=True,
        rope_parameters=_rows_and_columns(3, 3, 2),
    ),
    "qwen 3 vl": lambda: _qwen(Qwen3VLConfig, _DEEP, rope_parameters=_rows_and_columns(2, 2, 1)),
    "qwen 3 vl, three heads over one, tied": lambda: _qwen(
        Qwen3VLConfig,
        _SQUARE | {"num_heads": 3, "num_position_embeddings": 16, "deepstack_visual_indexes": [1]},
        **_ONE,
        head_dim=14,
        tie_word_embeddings=True,
        rope_parameters=_rows_and_columns(3, 2, 2),
    ),
    "qwen 3 vl, experts": lambda: _qwen(
        Qwen3VLMoeConfig,
        _DEEP,
        rope_parameters=_rows_and_columns(2, 1, 2),
        norm_topk_prob=True,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=27,
    ),
    "qwen 3 vl, experts, three heads over one, a dense layer, tied": lambda: _qwen(
        Qwen3VLMoeConfig,
        _DEEP | {"num_heads": 3},
        **_ONE,
        tie_word_embeddings=True,
        rope_parameters=_rows_and_columns(2, 2, 1),
        norm_topk_prob=True,
        num_experts=5,
        num_experts_per_tok=1,
        moe_intermediate_size=21,
        mlp_only_layers=[1],
    ),
    "qwen 3.5": lambda: _qwen(Qwen3_5Config, _SQUARE, **DELTA, layer_types=["linear_attention", "full_attention"] * 2),
    "qwen 3.5, four heads over one, attention first, tied": lambda: _qwen(
        Qwen3_5Config,
        _SQUARE | {"num_heads": 3},
        **DELTA
        | {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "head_dim": 16,
            "rope_parameters": _rows_and_columns(2, 1, 1, partial_rotary_factor=0.5),
        },
        num_attention_heads=4,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        layer_types=["full_attention", "linear_attention"] * 2,
    ),
    "mistral 3": lambda: _mistral("mistral", 2, "silu"),
    "mistral 3, three heads over one, queries grow, tied": lambda: _mistral(
        "ministral3",
        3,
        "gelu",
        **_ONE,
        tie_word_embeddings=True,
        rope_parameters=YARN | {"llama_4_scaling_beta": 0.1},
    ),
    "glm 4.1 v": lambda: _qwen(
        Glm4vConfig,
        {"image_size": 18, "out_hidden_size": 72},
        head_dim=None,
        hidden_size=72,
        rope_parameters=_rows_and_columns(1, 1, 1, partial_rotary_factor=0.5),
    ),
    "glm 4.5 v, experts, three heads over one": lambda: _qwen(
        Glm4vMoeConfig,
        {"num_heads": 3, "image_size": 24, "out_hidden_size": 42, "attention_bias": True},
        **_ONE,
        head_dim=16,
        rope_parameters=_rows_and_columns(2, 1, 1, partial_rotary_factor=0.5),
        moe_intermediate_size=21,
        n_routed_experts=5,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
    ),
    "qwen 3.5, experts": lambda: _qwen(
        Qwen3_5MoeConfig,
        _SQUARE,
        **DELTA,
        layer_types=["linear_attention", "full_attention"] * 2,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=21,
        shared_expert_intermediate_size=11,
    ),
    "glm 4.6 v": lambda: _qwen(
        Glm46VConfig,
        {"num_heads": 3, "image_size": 24, "out_hidden_size": 72},
        head_dim=None,
        hidden_size=72,
        rope_parameters=_rows_and_columns(1, 1, 1, partial_rotary_factor=0.5),
    ),
    "qwen 3.5, experts, four heads over one, attention first, tied": lambda: _qwen(
        Qwen3_5MoeConfig,
        _SQUARE | {"num_heads": 3},
        **DELTA
        | {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "head_dim": 16,
            "rope_parameters": _rows_and_columns(2, 1, 1, partial_rotary_factor=0.5),
        },
        num_attention_heads=4,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        layer_types=["full_attention", "linear_attention"] * 2,
        num_experts=4,
        num_experts_per_tok=1,
        moe_intermediate_size=9,
        shared_expert_intermediate_size=8,
    ),
    "glm 4.6 v, experts, three heads over one": lambda: _qwen(
        Glm46VConfig,
        {"image_size": 18, "out_hidden_size": 42, "attention_bias": True},
        **_ONE,
        model_type="glm4v_moe_text",
        head_dim=16,
        rope_parameters=_rows_and_columns(1, 2, 1, partial_rotary_factor=0.5),
        moe_intermediate_size=21,
        n_routed_experts=4,
        num_experts_per_tok=1,
        first_k_dense_replace=1,
    ),
    "gemma 3, windows but in layer 2": lambda: _gemma3(
        {"hidden_size": 24, "num_attention_heads": 2, "image_size": 36},
        9,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        num_hidden_layers=4,
        sliding_window=6,  # less than an image
        query_pre_attn_scalar=6,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
        },
    ),
    "gemma 3, one kv head, tied": lambda: _gemma3(
        {"hidden_size": 30, "num_attention_heads": 3, "image_size": 60},
        25,
        num_attention_heads=3,
        num_key_value_heads=1,
        sliding_window=33,
        query_pre_attn_scalar=10,
        rope_parameters=None,
        tie_word_embeddings=True,
    ),
    "gemma 4, keys are values": lambda: _gemma4(
        {"hidden_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 12, "standardize": True},
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        sliding_window=7,
        global_head_dim=16,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        final_logit_softcapping=3.0,
        use_bidirectional_attention="vision",
        rope_parameters={
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 9_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    ),
    "gemma 4, one kv head, clipped, causal, tied": lambda: _gemma4(
        {
            "hidden_size": 30,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 8,
            "use_clipped_linears": True,
        },
        num_attention_heads=3,
        num_key_value_heads=1,
        sliding_window=23,
        global_head_dim=14,
        rope_parameters=None,
        tie_word_embeddings=True,
    ),
}
