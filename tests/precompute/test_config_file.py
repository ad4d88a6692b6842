"""The keys that ordinary folders have, of every architecture: taken; those that would be another
model: refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import CONFIG_MAPPING

from precompute.store.errors import ConfigError, ModelError
from precompute.text.bert import KINDS
from precompute.text.config_file import check_config
from precompute.text.sentence_folder import PICTURES
from precompute.text.tokenizer_file import check_tokenizer_settings
from precompute.text.transformer import DECODERS, ENCODERS, model_type

BERT = {
    "_name_or_path": "/root/.cache/torch/sentence_transformers/model/",
    "architectures": ["BertModel"],
    "attention_probs_dropout_prob": 0.1,
    "classifier_dropout": None,
    "gradient_checkpointing": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 384,
    "id2label": {"0": "LABEL_0"},
    "initializer_range": 0.02,
    "intermediate_size": 1536,
    "label2id": {"LABEL_0": 0},
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "torch_dtype": "float32",
    "transformers_version": "4.30.0",
    "type_vocab_size": 2,
    "use_cache": True,
    "vocab_size": 30522,
}
DIRECTIONAL = {
    "directionality": "bidi",
    "pooler_fc_size": 768,
    "pooler_num_attention_heads": 12,
    "pooler_num_fc_layers": 3,
    "pooler_size_per_head": 128,
    "pooler_type": "first_token_transform",
}
ROBERTA = {**BERT, "bos_token_id": 0, "eos_token_id": 2, "output_past": True, "pad_token_id": 1}
QWEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.3",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151669,
}
GENERATING: dict[str, Any] = {
    "bos_token_id": 0,
    "do_sample": False,
    "eos_token_ids": 0,
    "finetuning_task": None,
    "is_decoder": False,
    "length_penalty": 1.0,
    "max_length": 20,
    "num_beams": 1,
    "num_labels": 2,
    "num_return_sequences": 1,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_past": True,
    "pruned_heads": {},
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "torchscript": False,
    "use_bfloat16": False,
    "xla_device": False,
}
"""What transformers 2 wrote of every model."""
ORDINARY: dict[str, dict[str, Any]] = {
    "all-MiniLM, bge, e5, gte": BERT,
    "a BERT of 2020": {**BERT, **GENERATING},
    "ms-marco-MiniLM": {
        **BERT,
        "architectures": ["BertForSequenceClassification"],
        "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity",
        "sentence_transformers": {
            "activation_fn": "torch.nn.modules.linear.Identity",
            "version": "4.1.0.dev0",
        },
    },
    "bge-m3 and its reranker": {
        **ROBERTA,
        "architectures": ["XLMRobertaForSequenceClassification"],
        "max_position_embeddings": 8194,
        "model_type": "xlm-roberta",
        "type_vocab_size": 1,
    },
    "for servers and browsers": {
        **BERT,
        "is_matryoshka": True,
        "matryoshka_dimensions": [256],
        "transformers.js_config": {"use_external_data_format": {"model.onnx": 1}},
        "unsloth_version": "2026.1",
    },
    "a multilingual BERT": {**BERT, **DIRECTIONAL},
    "multilingual-e5": {
        **ROBERTA,
        "model_type": "xlm-roberta",
        "architectures": ["XLMRobertaModel"],
    },
    "all-roberta": {**ROBERTA, "model_type": "roberta"},
    "sentence-camembert": {**ROBERTA, "model_type": "camembert"},
    "all-mpnet": {
        **{name: value for name, value in ROBERTA.items() if name != "type_vocab_size"},
        "model_type": "mpnet",
        "relative_attention_num_buckets": 32,
    },
    "distilbert": {
        "activation": "gelu",
        "architectures": ["DistilBertModel"],
        "attention_dropout": 0.1,
        "dim": 768,
        "dropout": 0.1,
        "hidden_dim": 3072,
        "initializer_range": 0.02,
        "max_position_embeddings": 512,
        "model_type": "distilbert",
        "n_heads": 12,
        "n_layers": 6,
        "output_hidden_states": False,
        "pad_token_id": 0,
        "qa_dropout": 0.1,
        "seq_classif_dropout": 0.2,
        "sinusoidal_pos_embds": False,
        "tie_weights_": True,
        "vocab_size": 30522,
    },
    "albert": {
        **BERT,
        "model_type": "albert",
        "classifier_dropout_prob": 0.1,
        "down_scale_factor": 1,
        "embedding_size": 128,
        "gap_size": 0,
        "inner_group_num": 1,
        "net_structure_type": 0,
        "num_hidden_groups": 1,
        "num_memory_blocks": 0,
    },
    "deberta-v3": {
        **BERT,
        "model_type": "deberta-v2",
        "max_relative_positions": -1,
        "norm_rel_ebd": "layer_norm",
        "pooler_dropout": 0,
        "pooler_hidden_act": "gelu",
        "pooler_hidden_size": 768,
        "pos_att_type": "p2c|c2p",
        "position_biased_input": False,
        "position_buckets": 256,
        "relative_attention": True,
        "share_att_key": True,
    },
    "electra": {
        **BERT,
        "model_type": "electra",
        "embedding_size": 128,
        "summary_activation": "gelu",
        "summary_last_dropout": 0.1,
        "summary_type": "first",
        "summary_use_proj": True,
    },
    "gte-modernbert": {
        "architectures": ["ModernBertModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 50281,
        "classifier_activation": "gelu",
        "classifier_bias": False,
        "classifier_dropout": 0.0,
        "classifier_pooling": "mean",
        "cls_token_id": 50281,
        "decoder_bias": True,
        "deterministic_flash_attn": False,
        "embedding_dropout": 0.0,
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0,
        "gradient_checkpointing": False,
        "hidden_activation": "gelu",
        "initializer_cutoff_factor": 2.0,
        "layer_norm_eps": 1e-05,
        "local_attention": 128,
        "local_rope_theta": 10000.0,
        "mlp_bias": False,
        "mlp_dropout": 0.0,
        "model_type": "modernbert",
        "norm_bias": False,
        "norm_eps": 1e-05,
        "position_embedding_type": "absolute",
        "reference_compile": None,
        "repad_logits_with_grad": False,
        "sep_token_id": 50282,
        "sparse_pred_ignore_index": -100,
        "sparse_prediction": False,
    },
    "Qwen3-Embedding": {**QWEN, "model_type": "qwen3"},
    "a Qwen2": {**QWEN, "model_type": "qwen2", "is_causal": False, "attention_bias": None},
    "a Mistral": {**QWEN, "model_type": "mistral"}
    | {"max_window_layers": None, "use_sliding_window": None, "attention_bias": None},
    "embeddinggemma": {
        "_sliding_window_pattern": 6,
        "architectures": ["Gemma3TextModel"],
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention"] * 24,
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": 257,
        "use_bidirectional_attention": True,
    },
    "clip-vit": {
        "_commit_hash": None,
        "architectures": ["CLIPModel"],
        "initializer_factor": 1.0,
        "logit_scale_init_value": 2.6592,
        "model_type": "clip",
        "projection_dim": 512,
        "text_config": {},
        "text_config_dict": None,
        "vision_config": {},
        "vision_config_dict": None,
    },
    "its tower": {
        "_name_or_path": "",
        "add_cross_attention": False,
        "bad_words_ids": None,
        "chunk_size_feed_forward": 0,
        "cross_attention_hidden_size": None,
        "diversity_penalty": 0.0,
        "do_sample": False,
        "dropout": 0.0,
        "early_stopping": False,
        "encoder_no_repeat_ngram_size": 0,
        "finetuning_task": None,
        "is_decoder": False,
        "is_encoder_decoder": False,
        "length_penalty": 1.0,
        "model_type": "clip_vision_model",
        "num_beam_groups": 1,
        "num_beams": 1,
        "output_attentions": False,
        "patch_size": 32,
        "pruned_heads": {},
        "return_dict": True,
        "return_dict_in_generate": False,
        "temperature": 1.0,
        "tf_legacy_loss": False,
        "tie_encoder_decoder": False,
        "top_k": 50,
        "torchscript": False,
        "typical_p": 1.0,
        "use_bfloat16": False,
    },
}


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_configuration_is_taken(name: str) -> None:
    config = ORDINARY[name]
    check_config(config, Path("config.json"), "a model", plain=config["model_type"] in KINDS)


@pytest.mark.parametrize("kind", [*ENCODERS, *DECODERS, *PICTURES])
def test_what_transformers_writes_is_taken(kind: str, tmp_path: Path) -> None:
    """All settings that it has of an architecture, as it saves them and those that it leaves out;
    one more is refused. Of two towers those of the pictures' count as well."""
    made = CONFIG_MAPPING[kind]()
    made.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    configs = [saved, made.to_dict()]
    configs += [
        {**config["vision_config"], "model_type": f"{kind}_vision_model"}
        for config in configs
        if "vision_config" in config
    ]
    assert all(len(config) > 10 for config in configs if "text_config" not in config)
    for config in configs:
        check_config(config, tmp_path, "a model", plain=kind in KINDS)
    for name, value in (("surprise", 1), ("quantization_config", {}), ("pruned_heads", {"0": [1]})):
        for config in configs:
            with pytest.raises(ConfigError, match=name):
                check_config(config | {name: value}, tmp_path, "a model", plain=kind in KINDS)


def test_a_bert_has_all_of_its_heads() -> None:
    """Which nobody else looks at."""
    check_config({**BERT, "head_dim": 32}, Path("config.json"), "a model", plain=True)
    with pytest.raises(ConfigError, match=r"config\.json: head_dim is 1, and \d+ such heads have"):
        check_config({**BERT, "head_dim": 1}, Path("config.json"), "a model", plain=True)


TOKENIZERS: dict[str, dict[str, Any]] = {
    "bge": {
        "added_tokens_decoder": {},
        "clean_up_tokenization_spaces": True,
        "cls_token": "[CLS]",
        "do_basic_tokenize": True,
        "do_lower_case": True,
        "mask_token": "[MASK]",
        "max_length": 512,
        "model_max_length": 512,
        "never_split": None,
        "pad_to_multiple_of": None,
        "pad_token": "[PAD]",
        "pad_token_type_id": 0,
        "padding_side": "right",
        "sep_token": "[SEP]",
        "stride": 0,
        "strip_accents": None,
        "tokenize_chinese_chars": True,
        "tokenizer_class": "BertTokenizer",
        "truncation_side": "right",
        "truncation_strategy": "longest_first",
        "unk_token": "[UNK]",
    },
    "multilingual-e5": {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "mask_token": {"__type": "AddedToken", "content": "<mask>", "lstrip": True},
        "model_max_length": 512,
        "name_or_path": "xlm-roberta-base",
        "sp_model_kwargs": {},
        "special_tokens_map_file": None,
        "tokenizer_class": "XLMRobertaTokenizer",
    },
    "Qwen3-Embedding": {
        "add_bos_token": False,
        "add_prefix_space": False,
        "additional_special_tokens": ["<|im_start|>"],
        "bos_token": None,
        "chat_template": "{% if tools %}",
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 131072,
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
    },
    "embeddinggemma": {
        "add_bos_token": True,
        "add_eos_token": True,
        "boi_token": "<start_of_image>",
        "image_token": "<image_soft_token>",
        "extra_special_tokens": {"boi_token": "<start_of_image>"},
        "processor_class": "Gemma3Processor",
        "sp_model_kwargs": None,
        "spaces_between_special_tokens": False,
        "tokenizer_class": "GemmaTokenizer",
        "use_default_system_prompt": False,
    },
    "modernbert": {
        "clean_up_tokenization_spaces": True,
        "model_input_names": ["input_ids", "attention_mask"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    },
    "deberta-v3": {
        "do_lower_case": False,
        "split_by_punct": False,
        "vocab_type": "spm",
        "tokenizer_class": "DebertaV2Tokenizer",
    },
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_settings_of_an_ordinary_tokenizer_are_taken(name: str, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(TOKENIZERS[name]))
    check_tokenizer_settings(tmp_path, Tokenizer(models.BPE()), "a model")
    file.write_text(json.dumps(TOKENIZERS[name] | {"surprise": 1}))
    with pytest.raises(ConfigError, match="has surprise, which is not known of tokenizer_config"):
        check_tokenizer_settings(tmp_path, Tokenizer(models.BPE()), "a model")


@pytest.mark.parametrize(
    ("config", "side", "refused"),
    [
        ({}, "right", ""),
        ({}, "left", r"tokenizer\.json: truncation\.direction is left; only right"),
        ({"truncation_side": "right"}, "left", ""),
        ({"truncation_side": "left"}, "right", r"config\.json: truncation_side is left; only"),
        ({"model_max_length": 1e30}, "right", ""),
        ({"model_max_length": "512"}, "right", "model_max_length is '512', not an int"),
        ({"model_max_length": 12.5}, "right", "model_max_length is '12.5', not an int"),
        ({"model_max_length": True}, "right", "model_max_length is 'True', not an int"),
    ],
)
def test_where_a_text_is_cut_is_said_by_both_files(
    tmp_path: Path, config: dict[str, Any], side: str, refused: str
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.enable_truncation(8, direction=side)
    if not refused:
        check_tokenizer_settings(tmp_path, tokenizer, "a model")
        return
    with pytest.raises((ConfigError, ModelError), match=refused):
        check_tokenizer_settings(tmp_path, tokenizer, "a model")


def test_a_model_of_its_own_code_is_refused_and_a_head_of_it_is_not(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(BERT | {"auto_map": {"AutoModelForMaskedLM": "a.B"}}))
    assert model_type(file) == "bert"
    file.write_text(json.dumps(BERT | {"auto_map": {"AutoModel": "a.B"}}))
    with pytest.raises(ConfigError, match="is never run"):
        model_type(file)
