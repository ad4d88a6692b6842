"""Config file: what is known of the keys of a transformer's config.json: which decide values, and
are read here or by transformers, and which do not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from precompute.foreign_file import KnownKeys
from precompute.safetensors_file import DEQUANTIZE
from precompute.store.errors import ConfigError

_TRAINING = "of training alone"
_GENERATION = "of texts that a model writes"
_ORIGIN = "where the model came from"
_OUTPUTS = "what else is given out; the values are the same"

NOT_OF_VALUES: Mapping[str, str] = {
    "_name_or_path": _ORIGIN,
    "name_or_path": _ORIGIN,
    "_commit_hash": _ORIGIN,
    "transformers_version": _ORIGIN,
    "architectures": "the class that was saved; which one is made is said by model.use",
    "tokenizer_class": "tokenizer_config.json and tokenizer.json have the tokenizer",
    "model_max_length": "the longest input is the tokenizer's, or the module's own",
    "finetuning_task": _ORIGIN,
    "language": _ORIGIN,
    "name": _ORIGIN,
    "dtype": "weights are computed in the precision of the view",
    "torch_dtype": "weights are computed in the precision of the view",
    "use_bfloat16": "weights are computed in the precision of the view",
    "gradient_checkpointing": _TRAINING,
    "*dropout*": _TRAINING,
    "*drop_prob": _TRAINING,
    "initializer_range": _TRAINING,
    "initializer_factor": _TRAINING,
    "initializer_cutoff_factor": _TRAINING,
    "sparse_prediction": _TRAINING,
    "sparse_pred_ignore_index": _TRAINING,
    "deterministic_flash_attn": _TRAINING,
    "reference_compile": "how it is compiled",
    "repad_logits_with_grad": _TRAINING,
    "pretraining_tp": _TRAINING,
    "task_specific_params": "of tasks other than this one",
    "prefix": _GENERATION,
    "use_cache": _GENERATION,
    "cache_implementation": _GENERATION,
    "output_attentions": _OUTPUTS,
    "output_hidden_states": _OUTPUTS,
    "output_past": _OUTPUTS,
    "torchscript": _OUTPUTS,
    "chunk_size_feed_forward": "memory; the values are the same",
    "attn_implementation": "by what kernel attention is computed",
    "_attn_implementation": "by what kernel attention is computed",
    "_attn_implementation_autoset": "by what kernel attention is computed",
    "tie_word_embeddings": "of the head that predicts tokens",
    "tie_weights_": "of the head that predicts tokens",
    "tie_encoder_decoder": "it has no second half",
    "cross_attention_hidden_size": "it has no second half",
    "*_token_id": "special tokens are the tokenizer's, and padding is masked",
    "*_token_ids": "special tokens are the tokenizer's, and padding is masked",
    "directionality": "left by the first implementation",
    "pooler_fc_size": "left by the first implementation",
    "pooler_num_attention_heads": "left by the first implementation",
    "pooler_num_fc_layers": "left by the first implementation",
    "pooler_size_per_head": "left by the first implementation",
    "pooler_type": "left by the first implementation",
    "net_structure_type": "left by the first implementation",
    "net_num_layers": "left by the first implementation",
    "network_type": "left by the first implementation",
    "num_memory_blocks": "left by the first implementation",
    "down_scale_factor": "left by the first implementation",
    "gap_size": "left by the first implementation",
    "logit_scale_init_value": _TRAINING,
    "decoder_start_token_id": _GENERATION,
    "xla_device": "where it was trained",
    "unsloth_*": _ORIGIN,
    "transformers.js_config": "of graphs for browsers, which are not read",
    "is_matryoshka": "how far a server may cut vectors; here `truncate_dim` says it",
    "matryoshka_dimensions": "how far a server may cut vectors; here `truncate_dim` says it",
    "auto_map": "own code for other uses; what it names for this one is refused",
    **dict.fromkeys(
        (
            "assistant_*",
            "bad_words_ids",
            "begin_suppress_tokens",
            "diversity_penalty",
            "do_sample",
            "early_stopping",
            "encoder_no_repeat_ngram_size",
            "encoder_repetition_penalty",
            "epsilon_cutoff",
            "eta_cutoff",
            "exponential_decay_length_penalty",
            "length_penalty",
            "max_length",
            "max_new_tokens",
            "min_length",
            "no_repeat_ngram_size",
            "num_assistant_*",
            "num_beam*",
            "num_return_sequences",
            "output_scores",
            "remove_invalid_values",
            "repetition_penalty",
            "return_dict_in_generate",
            "suppress_tokens",
            "target_lookbehind",
            "temperature",
            "tf_legacy_loss",
            "top_k",
            "top_p",
            "typical_p",
        ),
        _GENERATION,
    ),
}
"""Keys of any model's config.json, with why no vector depends on them."""

LABELS = (
    "id2label",
    "label2id",
    "_num_labels",
    "num_labels",
    "problem_type",
    "sentence_transformers",
    "sbert_ce_default_activation_function",
)
"""Keys that a classifier is read by."""

FIXED: Mapping[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    # of classes that have them they are read
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "return_dict": (True,),
    "pruned_heads": ({}, None),
    "position_embedding_type": ("absolute",),
}
"""Settings that the classes of transformers 5 no longer follow, or that give another output."""

QUANTIZED = dict.fromkeys(
    ("quantization_config", "quantization", "compression_config", "quant_config"),
    f"the weights are quantized: {DEQUANTIZE}",
)

BERT_CONFIG = KnownKeys(
    "config.json of a BERT (bert, camembert, roberta, xlm-roberta)",
    used=(
        "model_type",
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "max_position_embeddings",
        "type_vocab_size",
        "pad_token_id",
        "layer_norm_eps",
        "head_dim",
        "hidden_act",
        "is_decoder",
        "add_cross_attention",
        *LABELS,
    ),
    harmless=NOT_OF_VALUES,
    fixed=FIXED,
    refused=QUANTIZED,
)

TRANSFORMER_CONFIG = KnownKeys(
    "config.json of any other transformer",
    used=(
        "model_type",
        "(each setting of the architecture's class in transformers)",
        *LABELS,
    ),
    harmless=NOT_OF_VALUES,
    fixed=FIXED,
    refused=QUANTIZED,
)
"""What the architecture's own class has as a setting is read by it: see
:func:`check_config`."""

ROPE = ("rope_theta", "rope_scaling", "partial_rotary_factor")
"""Older names of ``rope_parameters``, which classes that have it read."""

OLDER: Mapping[str, tuple[str, ...]] = {
    "deberta-v2": (
        "attention_head_size",
        "conv_act",
        "conv_groups",
        "conv_kernel_size",
        "embedding_size",
        "norm_rel_ebd",
        "pooler_hidden_size",
        "position_buckets",
        "share_att_key",
    ),
    "modernbert": (
        "global_attn_every_n_layers",
        "global_rope_theta",
        "local_rope_theta",
        # it never had another
        "layer_norm_eps",
    ),
    "gemma3_text": ("_sliding_window_pattern", "rope_local_base_freq", "sliding_window_pattern"),
    "clip": ("text_config_dict", "vision_config_dict"),
}
"""Settings that a class of transformers reads without having them as its own."""


def check_config(config: Mapping[str, Any], file: Path, use: str, plain: bool = False) -> None:
    """Refuse a ``config.json`` that has a key that is not known.

    Args:
        config: with a ``model_type`` that transformers has.
        plain: whether it is a BERT, of which transformers need not be asked.

    Raises:
        ConfigError: names the key and the remedy; so it does of a BERT that lost heads.
    """
    known = BERT_CONFIG if plain else _of_class(str(config["model_type"]))
    # what is not set means nothing, but where the default is another
    given = {key: value for key, value in config.items() if value is not None or key in known.fixed}
    known.check(given, file, use)
    sizes: list[Any] = [
        config.get(name) for name in ("head_dim", "num_attention_heads", "hidden_size")
    ]
    if plain and all(type(size) is int for size in sizes) and sizes[0] * sizes[1] != sizes[2]:
        raise ConfigError(
            "{}: {}: head_dim is {}, and {} such heads have not the {} numbers of a token together,"
            " as a BERT's have: save the model with all of its heads, or write a model class of"
            " your own".format(use, file, *sizes)
        )


def _of_class(kind: str) -> KnownKeys:
    from transformers import CONFIG_MAPPING

    made = CONFIG_MAPPING[kind]
    names = {field.name for field in dataclasses.fields(made)} | set(made.attribute_map)
    # what each class has, and none follows
    names -= {"is_encoder_decoder", "return_dict"}
    ropes: tuple[str, ...] = ()
    fixed = FIXED
    if "rope_parameters" in names:
        ropes = (*ROPE, "is_causal", "head_dim")
        fixed = {**FIXED, "position_embedding_type": ("absolute", "rope", "rotary")}
    return dataclasses.replace(
        TRANSFORMER_CONFIG,
        file=f"config.json of {kind}",
        used=("model_type", *LABELS, *sorted(names), *ropes, *OLDER.get(kind, ())),
        fixed=fixed,
    )
