"""Rows of tests/benchmarks/zoo.py of model families for which nothing in ampkit was written or tuned.

Most are of transformers, as in zoo_transformers.py but without adapters; the rest are of timm. Where a class computes
no loss itself, its loss is the mean squared distance of one of its outputs from the labels.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zoo_models import Batch, Row, Sample, classify, images, timm_model
from zoo_transformers import (
    BATCH,
    GPT,
    IMAGE,
    LENGTH,
    PAIR,
    SIDE,
    SOUND,
    SPECIAL,
    TEXT,
    WORDS,
    Detection,
    Kind,
    causal,
    grouped,
    language,
    masked,
    named,
    objects,
    padded,
    padded_sounds,
    pictures,
    regions,
    small_backbone,
    sounds,
    tower,
    translation,
    translator,
    unlabelled,
    words,
)

# -------------------------------------------------------------------------------------------------------------- batches


def sentences(made: torch.Generator) -> Batch:
    return {"input_ids": words(made), "labels": torch.randint(2, (BATCH,), generator=made)}


def boxed(sample: Sample) -> Sample:
    """Return what makes the same batch with a box on the page for each word."""

    def sample_boxed(made: torch.Generator) -> Batch:
        corners = torch.randint(500, (BATCH, LENGTH, 2), generator=made)
        sides = torch.randint(1, 400, (BATCH, LENGTH, 2), generator=made)
        return {**sample(made), "bbox": torch.cat([corners, corners + sides], 2)}

    return sample_boxed


def both(*samples: Sample) -> Sample:
    """Return what makes the union of these batches; a later one wins."""
    return lambda made: {name: tensor for sample in samples for name, tensor in sample(made).items()}


def normal(**shapes: tuple[int, ...]) -> Sample:
    """Return what makes normal numbers of these shapes."""
    return lambda made: {name: torch.randn(shape, generator=made) for name, shape in shapes.items()}


def whole(count: int, **shapes: tuple[int, ...]) -> Sample:
    """Return what makes whole numbers below `count` of these shapes."""
    return lambda made: {name: torch.randint(count, shape, generator=made) for name, shape in shapes.items()}


def renamed(sample: Sample, **names: str) -> Sample:
    """Return what makes the same batch with other names, each given as new=old."""
    olds = {old: new for new, old in names.items()}
    return lambda made: {olds.get(name, name): tensor for name, tensor in sample(made).items()}


def fixed(**tensors: Tensor) -> Sample:
    return lambda made: {name: tensor.clone() for name, tensor in tensors.items()}


def with_image(count: int, token: int = 3, **more: tuple[int, ...]) -> Sample:
    """Return what makes words of which the first `count` stand for an image, and the image."""

    def sample(made: torch.Generator) -> Batch:
        tokens = words(made, WORDS - 1) + 1
        tokens[:, :count] = token
        return {"input_ids": tokens, "labels": tokens.masked_fill(tokens == token, -100), **normal(**more)(made)}

    return sample


def series(made: torch.Generator) -> Batch:
    """Return series of numbers with their time features, of which some were not observed."""
    past, future = 23, 8  # a context of 16 and 7 lags
    return {
        "past_values": torch.randn(BATCH, past, generator=made),
        "past_time_features": torch.randn(BATCH, past, 2, generator=made),
        "past_observed_mask": (torch.rand(BATCH, past, generator=made) > 0.1).float(),
        "future_values": torch.randn(BATCH, future, generator=made),
        "future_time_features": torch.randn(BATCH, future, 2, generator=made),
    }


def masks(made: torch.Generator) -> Batch:
    return {
        "pixel_values": torch.randn(2, 3, 64, 64, generator=made),
        "masks": (torch.rand(2, 3, 64, 64, generator=made) > 0.5).float(),
        "classes": torch.randint(3, (2, 3), generator=made),
    }


def flattened(made: torch.Generator) -> Batch:
    """Return patches with the numbers of their row and column in front."""
    places = torch.cartesian_prod(torch.arange(1.0, 5.0), torch.arange(1.0, 5.0)).expand(BATCH, 16, 2)
    patches = torch.cat([places, torch.randn(BATCH, 16, 48, generator=made)], 2)
    return {"flattened_patches": patches, "labels": words(made)}


def flava_labels(made: torch.Generator) -> Batch:
    tokens, hidden = words(made), torch.rand(BATCH, LENGTH, generator=made) < 0.3
    return {
        "input_ids": tokens,
        "input_ids_masked": tokens.masked_fill(hidden, 3),
        "mlm_labels": tokens.masked_fill(~hidden, -100),
        "bool_masked_pos": torch.rand(BATCH, 16, generator=made) < 0.3,
        "itm_labels": torch.tensor([0, 1, 1, 1]),
    }


def spoken(made: torch.Generator) -> Batch:
    """Return words of one or two frames each, and their sound."""
    durations = torch.tensor([1, 2] * (LENGTH // 2)).expand(BATCH, LENGTH).clone()
    frames = int(durations[0].sum())
    return {
        "input_ids": words(made),
        "attention_mask": torch.ones(BATCH, LENGTH).long(),
        "spectrogram_labels": torch.randn(BATCH, frames, 16, generator=made),
        "duration_labels": durations,
        "pitch_labels": torch.randn(BATCH, LENGTH, 1, generator=made),
        "energy_labels": torch.randn(BATCH, LENGTH, 1, generator=made),
    }


VIDEO = (BATCH, 4, 3, SIDE, SIDE)
large_pictures = both(normal(pixel_values=(BATCH, 3, 64, 64)), whole(2, labels=(BATCH,)))
clips = both(normal(pixel_values=VIDEO), whole(2, labels=(BATCH,)))
patches = fixed(bool_masked_pos=(torch.arange(32) % 4 > 0).expand(BATCH, 32))  # 3 of 4 are hidden
features = both(normal(input_features=(BATCH, 2 * LENGTH, 80)), whole(WORDS - 3, labels=(BATCH, 4)))
captions = both(lambda made: {"input_ids": words(made)}, unlabelled)
questions = both(captions, normal(labels=(BATCH, 2)))
forecasts = normal(past_values=(BATCH, 32, 1), future_values=(BATCH, 8, 1))
answers = both(lambda made: {"input_ids": words(made)}, whole(LENGTH, start_positions=(BATCH,), end_positions=(BATCH,)))


# --------------------------------------------------------------------------------------------------------------- models


@dataclass(frozen=True)
class Against(Kind):
    """A class without a loss of its own.

    Attributes:
        output: what is compared with the labels.
    """

    output: str = ""

    def loss(self, model: nn.Module, **batch: Tensor) -> Tensor:
        labels = batch.pop("labels")
        return F.mse_loss(getattr(model(**batch, **self.flags), self.output).float(), labels)


class Averaged(Kind):
    """A class that returns a loss for each sample."""

    def loss(self, model: nn.Module, **batch: Tensor) -> Tensor:
        return super().loss(model, **batch).mean()


class Segmentation(Kind):
    """A class whose labels are a list of masks and a list of their classes."""

    def loss(self, model: nn.Module, **batch: Tensor) -> Tensor:
        labels = {"mask_labels": list(batch["masks"]), "class_labels": list(batch["classes"])}
        loss: Tensor = model(pixel_values=batch["pixel_values"], **labels).loss
        return loss.squeeze()  # it has one dimension, of size 1


class Listed(Kind):
    """A class that takes its series as a list."""

    def loss(self, model: nn.Module, **batch: Tensor) -> Tensor:
        loss: Tensor = model(past_values=list(batch["past_values"]), future_values=batch["future_values"]).loss
        return loss


def pair(text: str, vision: str, sample: Sample = captions, /, **config: Any) -> dict[str, Any]:
    """Return the fields of a model of two towers that is trained by their contrast."""
    towers = {"text_config": tower(f"{text}Config", {**TEXT, **SPECIAL, **config.pop("text", {})})}
    towers |= {"vision_config": tower(f"{vision}Config", {**IMAGE, **config.pop("vision", {})})}
    made = {"config": {**towers, "projection_dim": 32, **config}, "sample": sample, "flags": {"return_loss": True}}
    return made | {"padded": padded(sample)}


def picture(model: str, sample: Sample = pictures, **config: Any) -> Kind:
    return Kind(f"{model}ForImageClassification", config, sample)


def speech(model: str, **config: Any) -> Kind:
    return Kind(f"{model}ForCTC", {**SOUND, **config}, sounds, padded_sounds)


def detector(model: str, **config: Any) -> Kind:
    return Detection(f"{model}ForObjectDetection", {**DETR, **config}, objects)


RESNET = {"embedding_size": 16, "hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1], "layer_type": "basic"}


def config_of(name: str, **sizes: Any) -> Callable[[], Any]:
    """Return what makes a config of this class."""

    def make() -> Any:
        import transformers

        return getattr(transformers, name)(**sizes)

    return make


def stages(*names: str) -> Callable[[], Any]:
    """Return what makes a small backbone that returns these stages."""
    return config_of("ResNetConfig", **RESNET, out_features=list(names))


SWIN = {"image_size": 64, "embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 4], "window_size": 4}
small_swin = config_of("SwinConfig", **SWIN, out_features=["stage1", "stage2", "stage3", "stage4"])
small_dino = config_of("Dinov2Config", **IMAGE, out_features=["stage1", "stage2"], reshape_hidden_states=False)
small_vitdet = config_of(
    "VitDetConfig", **IMAGE | {"image_size": 64, "patch_size": 16, "num_channels": 4}, out_features=["stage2"]
)
small_rt = config_of("RTDetrResNetConfig", **RESNET, out_features=["stage2", "stage3", "stage4"])
DETR = {key: value for key, value in PAIR.items() if key not in ("vocab_size", *SPECIAL, "decoder_start_token_id")}
DETR |= {"num_queries": 8, "num_labels": 3}
MOE = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}
MOE |= {"moe_intermediate_size": 64, "n_shared_experts": 1, "shared_expert_intermediate_size": 64, "head_dim": 16}
MOE |= {"n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
LATENT |= {**MOE, "first_k_dense_replace": 1, "num_key_value_heads": 4, "head_dim": 8}
HEADS = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
LINEAR |= {"linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"], "head_dim": 16}
SQUEEZED = {"conv_dim": (32, 32), "conv_kernel": (10, 4), "conv_stride": (5, 4)}
DENSE = """
    apertus:Apertus arcee:Arcee biogpt:BioGpt bitnet:BitNet doge:Doge emu3:Emu3 ernie4_5:Ernie4_5
    gpt_neox_japanese:GPTNeoXJapanese hyperclovax:HyperCLOVAX jais2:Jais2
    modernbert_decoder:ModernBertDecoder nanochat:NanoChat nemotron:Nemotron olmo:Olmo persimmon:Persimmon
    vaultgemma:VaultGemma
"""  # of a row name and a class each
SPARSE = """
    afmoe:Afmoe aria_text:AriaText cohere2:Cohere2 cohere2_moe:Cohere2Moe cwm:Cwm diffllama:DiffLlama dots1:Dots1
    ernie4_5_moe:Ernie4_5_Moe exaone4:Exaone4 exaone_moe:ExaoneMoe flex_olmo:FlexOlmo glm:Glm glm4:Glm4
    glm4_moe:Glm4Moe gpt_oss:GptOss granitemoe:GraniteMoe granitemoeshared:GraniteMoeShared granite_swa:GraniteSWA
    hrm_text:HrmText hunyuan_v1_dense:HunYuanDenseV1 hunyuan_v1_moe:HunYuanMoEV1 jetmoe:JetMoe laguna:Laguna
    llama4_text:Llama4 mellum:Mellum mimo_v2_flash:MiMoV2Flash minimax:MiniMax minimax_m2:MiniMaxM2
    ministral:Ministral olmo3:Olmo3 olmo_hybrid:OlmoHybrid phimoe:Phimoe qwen3_moe:Qwen3Moe seed_oss:SeedOss
    solar_open:SolarOpen
"""
COMPRESSED = """
    axk1:AXK1 deepseek_v2:DeepseekV2 deepseek_v3:DeepseekV3 deepseek_v32:DeepseekV32 deepseek_v4:DeepseekV4
    glm4_moe_lite:Glm4MoeLite minicpm3:MiniCPM3 youtu:Youtu
"""
BIDIRECTIONAL = """
    big_bird:BigBird data2vec_text:Data2VecText ernie:Ernie esm:Esm esmc:Esmc eurobert:EuroBert
    ibert:IBert jina_embeddings_v3:JinaEmbeddingsV3 megatron_bert:MegatronBert mra:Mra nomic_bert:NomicBert
    nystromformer:Nystromformer rembert:RemBert roberta_prelayernorm:RobertaPreLayerNorm tapas:Tapas
    xlm_roberta:XLMRoberta xlm_roberta_xl:XLMRobertaXL
"""
TRANSLATORS = "bigbird_pegasus:BigBirdPegasus blenderbot_small:BlenderbotSmall mvp:Mvp pegasus_x:PegasusX plbart:PLBart"
SPEECH = """
    data2vec_audio:Data2VecAudio unispeech:UniSpeech unispeech_sat:UniSpeechSat wav2vec2_conformer:Wav2Vec2Conformer
"""
OF_PATCHES = "data2vec_vision:Data2VecVision dinov2_with_registers:Dinov2WithRegisters ijepa:IJepa vit_msn:ViTMSN"


def pairs(text: str) -> dict[str, str]:
    return dict(item.split(":") for item in text.split())


KINDS: dict[str, Kind] = {
    **{name: causal(model) for name, model in pairs(DENSE).items()},
    **{name: causal(model, **MOE) for name, model in pairs(SPARSE).items()},
    **{name: causal(model, **LATENT) for name, model in pairs(COMPRESSED).items()},
    **{name: masked(model) for name, model in pairs(BIDIRECTIONAL).items()},
    **{name: translator(model) for name, model in pairs(TRANSLATORS).items()},
    **{name: speech(model) for name, model in pairs(SPEECH).items()},
    **{name: picture(model, **IMAGE) for name, model in pairs(OF_PATCHES).items()},
    # Language models of other shapes.
    "bamba": causal("Bamba", attn_layer_indices=[1], **HEADS),
    "helium": causal("Helium", head_dim=16),
    "deberta": replace(masked("Deberta"), policy="float32"),  # its mask overflows bfloat16
    "bert_generation": Kind("BertGenerationDecoder", {**TEXT, **SPECIAL, "is_decoder": True}, padded=padded(language)),
    "cpmant": causal("CpmAnt", dim_head=16, dim_ff=128, prompt_length=4, prompt_types=4, segment_types=4),
    "ctrl": Kind("CTRLLMHeadModel", {**named(GPT), "dff": 128}, padded=padded(language)),
    "dbrx": Kind(
        "DbrxForCausalLM",
        {**SPECIAL, "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "vocab_size": WORDS}
        | {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0}}
        | {"ffn_config": {"hidden_size": 64, "ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2}},
        padded=padded(language),
        policy="float32",  # its experts add in the type of the input
    ),
    "falcon_h1": causal("FalconH1", mamba_d_ssm=128, **HEADS),
    "falcon_mamba": causal("FalconMamba", state_size=8),
    "gemma3n": causal(
        "Gemma3n",
        layer_types=["sliding_attention", "full_attention"],
        **{"vocab_size_per_layer_input": WORDS, "hidden_size_per_layer_input": 16, "laurel_rank": 8, "head_dim": 16},
        **{"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.95, 0.0], "sliding_window": 16},
    ),
    "granitemoehybrid": causal(
        "GraniteMoeHybrid",
        layer_types=["mamba", "attention"],
        shared_intermediate_size=64,
        **HEADS,
        num_local_experts=4,
    ),
    "jamba": causal("Jamba", attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, mamba_dt_rank=8, num_experts=4),
    "kimi_linear": causal(
        "KimiLinear",
        **{**LATENT, "q_lora_rank": None, "layer_types": LINEAR["layer_types"], "mlp_layer_types": ["dense", "sparse"]},
        **{"linear_head_dim": 16, "linear_num_heads": 4, "num_experts_per_token": 2},
    ),
    "lfm2": causal("Lfm2", layer_types=["conv", "full_attention"]),
    "lfm2_moe": causal("Lfm2Moe", layer_types=["conv", "full_attention"], num_dense_layers=1, **MOE),
    "longcat_flash": causal(
        "LongcatFlash",
        **{**LATENT, "num_layers": 1, "ffn_hidden_size": 128, "expert_ffn_hidden_size": 64, "moe_topk": 2},
        zero_expert_num=2,
    ),
    "nemotron_h": causal(
        "NemotronH",
        **{**MOE, "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "n_groups": 1},
        **{"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "chunk_size": 16},
        moe_shared_expert_intermediate_size=64,
    ),
    "openai_gpt": Kind("OpenAIGPTLMHeadModel", named(GPT), padded=padded(language)),
    "qwen3_5": causal("Qwen3_5", **LINEAR),
    "qwen3_next": causal("Qwen3Next", **{**MOE, **LINEAR}),
    "trocr": Kind(
        "TrOCRForCausalLM",
        {**SPECIAL, "vocab_size": WORDS, "d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4}
        | {"decoder_ffn_dim": 128, "max_position_embeddings": 64},
        padded=padded(language),
    ),
    "xglm": causal("XGLM", d_model=64, ffn_dim=128, num_layers=2, attention_heads=4),
    "xlstm": Kind(
        "xLSTMForCausalLM", {**SPECIAL, "vocab_size": WORDS, "hidden_size": 128, "num_heads": 4, "num_blocks": 2}
    ),
    "zamba": causal(
        "Zamba",
        **{"attn_layer_period": 2, "attn_layer_offset": 1, "attention_hidden_size": 128, "attention_head_dim": 32},
        **{"mamba_d_state": 8, "mamba_dt_rank": 8, "num_hidden_layers": 4, "num_key_value_heads": 4},
        layers_block_type=["linear_attention", "hybrid"] * 2,
    ),
    "zamba2": causal(
        "Zamba2",
        **{"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "linear_attention"]},
        **{"mamba_d_state": 8, "n_mamba_heads": 8, "mamba_headdim": 16, "mamba_ngroups": 1, "chunk_size": 16},
        **{"num_mem_blocks": 1, "adapter_rank": 8, "use_mem_rope": False, "num_key_value_heads": 4},
    ),
    # Bidirectional ones.
    "canine": Kind(
        "CanineForSequenceClassification",
        {**TEXT, "num_hash_buckets": 64, "max_position_embeddings": 64, "local_transformer_stride": 16},
        sentences,
        padded(sentences),
    ),
    "flaubert": Kind(
        "FlaubertWithLMHeadModel",
        {"vocab_size": WORDS, "emb_dim": 64, "n_layers": 2, "n_heads": 4, "layerdrop": 0.5},
        padded=padded(language),
    ),
    "layoutlm": Kind("LayoutLMForMaskedLM", {**TEXT, **SPECIAL}, boxed(language), padded(boxed(language))),
    "lilt": Kind(
        "LiltForTokenClassification",
        {**TEXT, **SPECIAL, "hidden_size": 96, "num_labels": WORDS},
        boxed(language),
        padded(boxed(language)),
    ),
    "luke": masked("Luke", entity_vocab_size=16, entity_emb_size=32),
    "mobilebert": masked("MobileBert", embedding_size=16, intra_bottleneck_size=32, num_feedforward_networks=2),
    "perceiver": Kind(
        "PerceiverForMaskedLM",
        {"vocab_size": WORDS, "num_latents": 8, "d_latents": 64, "d_model": 32, "num_self_attends_per_block": 2}
        | {"num_self_attention_heads": 4, "num_cross_attention_heads": 4, "max_position_embeddings": LENGTH},
        padded=padded(language),
    ),
    "reformer": masked(
        "Reformer",
        **{"attention_head_size": 16, "attn_layers": ["local", "lsh"], "axial_pos_shape": [4, 8], "num_hashes": 2},
        **{"axial_pos_embds_dim": [16, 48], "feed_forward_size": 128, "local_attn_chunk_length": 8},
        **{"lsh_attn_chunk_length": 8, "num_buckets": 4, "max_position_embeddings": LENGTH},
    ),
    "roc_bert": masked(
        "RoCBert",
        **{"pronunciation_embed_dim": 16, "pronunciation_vocab_size": WORDS, "shape_embed_dim": 16},
        **{"shape_vocab_size": WORDS, "enable_pronunciation": True, "enable_shape": True},
    ),
    "splinter": Kind("SplinterForQuestionAnswering", {**TEXT, **SPECIAL, "question_token_id": 3}, answers),
    "xlm": Kind(
        "XLMWithLMHeadModel", {"vocab_size": WORDS, "emb_dim": 64, "n_layers": 2, "n_heads": 4}, padded=padded(language)
    ),
    "xmod": replace(masked("Xmod", languages=["en_XX", "de_DE"], default_language="en_XX"), policy="float32"),
    # Of an encoder and a decoder.
    "fsmt": Kind(
        "FSMTForConditionalGeneration",
        {**{key: size for key, size in PAIR.items() if key != "vocab_size"}, "src_vocab_size": WORDS}
        | {"tgt_vocab_size": WORDS, "langs": ["en", "de"]},
        translation,
        padded(translation),
    ),
    "longt5": Kind(
        "LongT5ForConditionalGeneration",
        {"vocab_size": WORDS, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
        | {"decoder_start_token_id": 0, "local_radius": 7, "encoder_attention_type": "transient-global"},
        translation,
        padded(translation),
    ),
    "marian": Kind("MarianMTModel", {**PAIR, "max_position_embeddings": 64}, translation, padded(translation)),
    "nllb_moe": translator("NllbMoe", num_experts=4, expert_capacity=16, encoder_sparse_step=2, decoder_sparse_step=2),
    "prophetnet": Kind(
        "ProphetNetForConditionalGeneration",
        {**SPECIAL, "vocab_size": WORDS, "hidden_size": 64, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
        | {
            f"num_{half}_{of}": n
            for half in ("encoder", "decoder")
            for of, n in (("layers", 2), ("attention_heads", 4))
        }
        | {"decoder_start_token_id": 1, "max_position_embeddings": 64},
        translation,
        padded(translation),
    ),
    "umt5": Kind(
        "UMT5ForConditionalGeneration",
        {"vocab_size": WORDS, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
        | {"decoder_start_token_id": 0},
        translation,
        padded(translation),
    ),
    "mt5": Kind(
        "MT5ForConditionalGeneration",
        {"vocab_size": WORDS, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
        | {"decoder_start_token_id": 0},
        translation,
        padded(translation),
    ),
    # Images.
    "bit": picture("Bit", embedding_size=16, hidden_sizes=[32, 64], depths=[1, 1], num_groups=8),
    "convnextv2": picture("ConvNextV2", num_stages=2, hidden_sizes=[16, 32], depths=[1, 1]),
    "cvt": picture("Cvt", embed_dim=[16, 32, 64], num_heads=[1, 2, 4], depth=[1, 2, 3]),
    "donut": picture("DonutSwin", image_size=SIDE, embed_dim=32, depths=[1, 1], num_heads=[2, 4], window_size=4),
    "efficientnet": picture(
        "EfficientNet", width_coefficient=0.5, depth_coefficient=0.3, hidden_dim=640, image_size=64
    ),
    "focalnet": picture(
        "FocalNet",
        image_size=SIDE,
        embed_dim=16,
        hidden_sizes=[16, 32],
        depths=[1, 1],
        focal_levels=[2, 2],
        focal_windows=[3, 3],
    ),
    "hgnet_v2": picture(
        "HGNetV2",
        **{"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 1], "stem_channels": [3, 8, 16]},
        **{"stage_in_channels": [16, 32], "stage_mid_channels": [8, 16], "stage_out_channels": [32, 64]},
        **{"stage_num_blocks": [1, 1], "stage_downsample": [False, True], "stage_downsample_strides": [2, 2]},
        **{"stage_light_block": [False, True], "stage_kernel_size": [3, 5], "stage_numb_of_layers": [2, 2]},
    ),
    "hiera": picture(
        "Hiera",
        **{"embed_dim": 16, "image_size": [SIDE, SIDE], "depths": [1, 1], "num_heads": [1, 2], "num_query_pool": 1},
        **{"masked_unit_size": [4, 4], "masked_unit_attention": [True, False]},
    ),
    "imagegpt": Kind(
        "ImageGPTForImageClassification",
        {"vocab_size": WORDS, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4},
        sentences,
    ),
    "levit": picture(
        "Levit",
        large_pictures,
        **{"image_size": 64, "hidden_sizes": [16, 32, 48], "num_attention_heads": [1, 2, 3], "depths": [1, 1, 1]},
        key_dim=[16, 16, 16],
    ),
    "mobilenet_v1": picture("MobileNetV1", depth_multiplier=0.25),
    "mobilenet_v2": picture("MobileNetV2", depth_multiplier=0.25),
    "mobilevit": picture(
        "MobileViT", image_size=SIDE, hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 64]
    ),
    "mobilevitv2": picture(
        "MobileViTV2", large_pictures, image_size=64, base_attn_unit_dims=[16, 24, 32], n_attn_blocks=[1, 1, 1]
    ),
    "poolformer": picture("PoolFormer", hidden_sizes=[16, 24, 32, 48], depths=[1, 1, 1, 1]),
    "pvt": picture("Pvt", image_size=SIDE, hidden_sizes=[16, 32, 40, 64], depths=[1, 1, 1, 1]),
    "pvt_v2": picture("PvtV2", image_size=SIDE, hidden_sizes=[16, 32, 40, 64], depths=[1, 1, 1, 1]),
    "regnet": picture("RegNet", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], groups_width=8),
    "resnet": picture("ResNet", embedding_size=16, hidden_sizes=[32, 64], depths=[1, 1]),
    "swiftformer": picture("SwiftFormer", depths=[1, 1, 1, 1], embed_dims=[16, 24, 32, 48], drop_path_rate=0.1),
    "swinv2": picture("Swinv2", image_size=SIDE, embed_dim=32, depths=[1, 1], num_heads=[2, 4], window_size=4),
    "textnet": picture("TextNet", hidden_sizes=[8, 8, 16, 24, 32], stem_out_channels=8),
    "siglip2": Kind(
        "Siglip2ForImageClassification",
        {"vision_config": tower("Siglip2VisionConfig", {**IMAGE, "num_patches": 16})}
        | {"text_config": tower("Siglip2TextConfig", {**TEXT, **SPECIAL})},
        both(
            normal(pixel_values=(BATCH, 16, 192)),
            fixed(pixel_attention_mask=torch.ones(BATCH, 16).long(), spatial_shapes=torch.tensor([[4, 4]] * BATCH)),
            whole(2, labels=(BATCH,)),
        ),
    ),
    # Videos.
    "timesformer": Kind("TimesformerForVideoClassification", {**IMAGE, "num_frames": 4}, clips),
    "videomae": Kind("VideoMAEForVideoClassification", {**IMAGE, "num_frames": 4}, clips),
    "videomae, pretraining": Kind(
        "VideoMAEForPreTraining",
        {**IMAGE, "num_frames": 4, "decoder_num_attention_heads": 4, "decoder_hidden_size": 32}
        | {"decoder_num_hidden_layers": 1, "decoder_intermediate_size": 64},
        both(normal(pixel_values=VIDEO), patches),
    ),
    "vivit": Kind("VivitForVideoClassification", {**IMAGE, "num_frames": 4, "tubelet_size": [2, 8, 8]}, clips),
    "vjepa2": Kind(
        "VJEPA2ForVideoClassification",
        {"crop_size": SIDE, "patch_size": 8, "frames_per_clip": 4, "hidden_size": 64, "num_attention_heads": 4}
        | {"num_hidden_layers": 2, "num_pooler_layers": 1, "pred_hidden_size": 48, "pred_num_attention_heads": 4}
        | {"pred_num_hidden_layers": 1},
        renamed(clips, pixel_values_videos="pixel_values"),
    ),
    # A label, a depth or a mask for each place; boxes.
    "clipseg": Kind(
        "CLIPSegForImageSegmentation",
        {
            "text_config": tower("CLIPSegTextConfig", {**TEXT, **SPECIAL}),
            "vision_config": tower("CLIPSegVisionConfig", IMAGE),
            **{"projection_dim": 32, "reduce_dim": 16, "extract_layers": [0, 1], "decoder_intermediate_size": 32},
        },
        both(captions, lambda made: {"labels": torch.rand(BATCH, SIDE, SIDE, generator=made)}),
    ),
    "conditional_detr": detector("ConditionalDetr", backbone_config=small_backbone),
    "dab_detr": detector("DabDetr", backbone_config=small_backbone, hidden_size=64),
    "deformable_detr": detector("DeformableDetr", backbone_config=stages("stage2", "stage3", "stage4")),
    "depth_anything": Against(
        "DepthAnythingForDepthEstimation",
        {
            "backbone_config": small_dino,
            **{"patch_size": 8, "reassemble_hidden_size": 64, "neck_hidden_sizes": [8, 16], "fusion_hidden_size": 16},
            **{"reassemble_factors": [2, 1], "head_hidden_size": 8},
        },
        both(unlabelled, normal(labels=(BATCH, SIDE, SIDE))),
        output="predicted_depth",
    ),
    "dpt": Kind(
        "DPTForSemanticSegmentation",
        {**IMAGE, "image_size": 64, "backbone_out_indices": [0, 1, 2, 3], "num_hidden_layers": 4}
        | {"neck_hidden_sizes": [8, 16, 24, 32], "fusion_hidden_size": 16},
        regions,
    ),
    "eomt": Segmentation(
        "EomtForUniversalSegmentation",
        {**IMAGE, "image_size": 64, "num_blocks": 1, "num_queries": 8, "train_num_points": 64, "num_labels": 3},
        masks,
    ),
    "glpn": Kind(
        "GLPNForDepthEstimation",
        {"hidden_sizes": [16, 32, 40, 64], "depths": [1, 1, 1, 1], "decoder_hidden_size": 16},
        both(regions, lambda made: {"labels": 1 + torch.rand(BATCH, 64, 64, generator=made)}),
    ),
    "mask2former": Segmentation(
        "Mask2FormerForUniversalSegmentation",
        {"backbone_config": small_swin, "feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32}
        | {"encoder_feedforward_dim": 64, "encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 4}
        | {"dim_feedforward": 64, "num_queries": 8, "train_num_points": 64, "num_labels": 3},
        masks,
    ),
    "maskformer": Segmentation(
        "MaskFormerForInstanceSegmentation",
        {"backbone_config": small_swin, "fpn_feature_size": 32, "mask_feature_size": 32, "num_labels": 3}
        | {"decoder_config": config_of("DetrConfig", **DETR, backbone_config=None)},
        masks,
    ),
    "rt_detr": detector(
        "RTDetr",
        backbone_config=small_rt,
        **{"encoder_hidden_dim": 32, "encoder_in_channels": [32, 48, 64], "encoder_ffn_dim": 64, "d_model": 32},
        **{"decoder_in_channels": [32, 32, 32], "decoder_ffn_dim": 64, "num_denoising": 8, "num_queries": 16},
        encoder_layers=1,
    ),
    "seggpt": Kind(
        "SegGptForImageSegmentation",
        {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "mlp_dim": 128, "image_size": [64, 32]}
        | {"patch_size": 8, "pretrain_image_size": 32, "decoder_hidden_size": 16, "merge_index": 0}
        | {"intermediate_hidden_state_indices": [0, 1, 2]},
        normal(**dict.fromkeys(("pixel_values", "prompt_pixel_values", "prompt_masks", "labels"), (BATCH, 3, 32, 32))),
    ),
    "swin2sr": Against(
        "Swin2SRForImageSuperResolution",
        {"image_size": SIDE, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
        both(unlabelled, normal(labels=(BATCH, 3, 2 * SIDE, 2 * SIDE))),
        output="reconstruction",
    ),
    "table_transformer": detector("TableTransformer", backbone_config=small_backbone),
    "upernet": Kind(
        "UperNetForSemanticSegmentation",
        {
            "backbone_config": stages("stage1", "stage2", "stage3", "stage4"),
            "hidden_size": 16,
            "auxiliary_channels": 16,
        },
        regions,
    ),
    "vitmatte": Against(
        "VitMatteForImageMatting",
        {
            "backbone_config": small_vitdet,
            **{"hidden_size": 64, "convstream_hidden_sizes": [8, 16, 24], "fusion_hidden_sizes": [32, 16, 8, 8]},
        },
        both(normal(pixel_values=(BATCH, 4, 64, 64)), normal(labels=(BATCH, 1, 64, 64))),
        output="alphas",
    ),
    "yolos": Detection(
        "YolosForObjectDetection",
        {**IMAGE, "image_size": [64, 64], "num_detection_tokens": 8, "num_labels": 3},
        objects,
    ),
    # Text with images.
    "align": Kind(
        "AlignModel",
        **pair(
            "AlignText",
            "AlignVision",
            vision={"width_coefficient": 0.5, "depth_coefficient": 0.3, "hidden_dim": 64},
            projection_dim=160,
        ),
    ),
    "altclip": Kind("AltCLIPModel", **pair("AltCLIPText", "AltCLIPVision", text={"project_dim": 32})),
    "blip": Kind(
        "BlipForConditionalGeneration",
        {
            "text_config": tower("BlipTextConfig", {**TEXT, **SPECIAL, "encoder_hidden_size": 64}),
            "vision_config": tower("BlipVisionConfig", IMAGE),
        },
        both(language, unlabelled),
        padded(both(language, unlabelled)),
    ),
    "chinese_clip": Kind("ChineseCLIPModel", **pair("ChineseCLIPText", "ChineseCLIPVision")),
    "flava": Kind(
        "FlavaForPreTraining",
        {
            "text_config": tower("FlavaTextConfig", {**TEXT, **SPECIAL}),
            "image_config": tower("FlavaImageConfig", {**IMAGE, "vocab_size": 16}),
            "multimodal_config": tower("FlavaMultimodalConfig", {"hidden_size": 64, "num_attention_heads": 4}),
            "image_codebook_config": tower("FlavaImageCodebookConfig", {"hidden_size": 8, "vocab_size": 16}),
            **{"hidden_size": 64, "projection_dim": 32},
        },
        both(captions, normal(codebook_pixel_values=(BATCH, 3, SIDE, SIDE)), flava_labels),
    ),
    "git": Kind(
        "GitForCausalLM",
        {**TEXT, **SPECIAL, "vision_config": tower("GitVisionConfig", IMAGE)},
        both(language, unlabelled),
    ),
    "groupvit": Kind(
        "GroupViTModel",
        **pair(
            "GroupViTText",
            "GroupViTVision",
            vision={"depths": [1, 1], "num_group_tokens": [8, 0], "num_output_groups": [8, 4]},
            projection_intermediate_dim=64,
        ),
    ),
    "layoutlmv3": Kind(
        "LayoutLMv3ForSequenceClassification",
        {**TEXT, **SPECIAL, "input_size": SIDE, "patch_size": 8, "coordinate_size": 8, "shape_size": 16},
        both(boxed(sentences), unlabelled),
        padded(both(boxed(sentences), unlabelled)),
    ),
    "llava": Kind(
        "LlavaForConditionalGeneration",
        {
            "text_config": tower("LlamaConfig", {**TEXT, **SPECIAL}),
            "vision_config": tower("CLIPVisionConfig", IMAGE),
            "image_token_index": 3,
        },
        with_image(16, pixel_values=(BATCH, 3, SIDE, SIDE)),
        padded(with_image(16, pixel_values=(BATCH, 3, SIDE, SIDE))),
    ),
    "lxmert": Kind(
        "LxmertForPreTraining",
        {"vocab_size": WORDS, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "l_layers": 1}
        | {"x_layers": 1, "r_layers": 1, "visual_feat_dim": 32, "num_qa_labels": 5, "task_obj_predict": False},
        both(language, normal(visual_feats=(BATCH, 6, 32), visual_pos=(BATCH, 6, 4)), whole(2, matched_label=(BATCH,))),
    ),
    "metaclip_2": Kind(
        "MetaClip2Model", **pair("MetaClip2Text", "MetaClip2Vision", text={"projection_dim": 32}, vision={})
    ),
    "paligemma": Kind(
        "PaliGemmaForConditionalGeneration",
        {
            "text_config": tower("GemmaConfig", {**TEXT, **SPECIAL, "head_dim": 16, "num_key_value_heads": 2}),
            "vision_config": tower("SiglipVisionConfig", {**IMAGE, "projection_dim": 64, "vision_use_head": False}),
            **{"image_token_index": 3, "projection_dim": 64, "hidden_size": 64},
        },
        both(
            with_image(16, pixel_values=(BATCH, 3, SIDE, SIDE)),
            fixed(token_type_ids=(torch.arange(LENGTH) > 20).long().expand(BATCH, LENGTH)),
            fixed(attention_mask=torch.ones(BATCH, LENGTH).long()),
        ),
    ),
    "pix2struct": Kind(
        "Pix2StructForConditionalGeneration",
        {
            "text_config": tower(
                "Pix2StructTextConfig",
                {"vocab_size": WORDS, "hidden_size": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4},
            ),
            "vision_config": tower(
                "Pix2StructVisionConfig",
                {**IMAGE, "patch_embed_hidden_size": 48, "d_ff": 128, "d_kv": 16, "seq_len": 32},
            ),
        },
        flattened,
    ),
    "qwen2_vl": Kind(
        "Qwen2VLForConditionalGeneration",
        {
            "text_config": tower(
                "Qwen2VLTextConfig",
                {**TEXT, **SPECIAL, "num_key_value_heads": 2}
                | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
            ),
            "vision_config": tower(
                "Qwen2VLVisionConfig", {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 8}
            ),
            **{"image_token_id": 3, "vision_start_token_id": 4, "vision_end_token_id": 5, "video_token_id": 6},
        },
        both(
            with_image(4, pixel_values=(BATCH * 16, 3 * 2 * 64)),
            fixed(image_grid_thw=torch.tensor([[1, 4, 4]] * BATCH)),
            fixed(mm_token_type_ids=(torch.arange(LENGTH) < 4).long().expand(BATCH, LENGTH)),
        ),
    ),
    "udop": Kind(
        "UdopForConditionalGeneration",
        {"vocab_size": WORDS, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_decoder_layers": 2}
        | {"num_heads": 4, "image_size": SIDE, "patch_size": 8, "decoder_start_token_id": 0},
        padded(
            both(boxed(translation), unlabelled, fixed(visual_bbox=torch.linspace(0, 1, BATCH * 64).view(BATCH, 16, 4)))
        ),
    ),
    "vilt": Kind(
        "ViltForQuestionAnswering", {**TEXT, **IMAGE, "max_position_embeddings": LENGTH}, questions, padded(questions)
    ),
    "visual_bert": Kind(
        "VisualBertForQuestionAnswering",
        {**TEXT, **SPECIAL, "visual_embedding_dim": 16},
        both(
            lambda made: {"input_ids": words(made), "attention_mask": torch.ones(BATCH, LENGTH).long()},
            normal(visual_embeds=(BATCH, 6, 16)),
            fixed(visual_attention_mask=torch.ones(BATCH, 6).long()),
            lambda made: {"labels": torch.rand(BATCH, 2, generator=made).softmax(1)},
        ),
    ),
    "x_clip": Kind(
        "XCLIPModel",
        **pair(
            "XCLIPText",
            "XCLIPVision",
            both(lambda made: {"input_ids": words(made)}, normal(pixel_values=VIDEO)),
            vision={"num_frames": 4, "mit_hidden_size": 32, "mit_intermediate_size": 64, "mit_num_attention_heads": 4},
            prompt_num_attention_heads=4,
        ),
    ),
    # Sounds.
    "audio_spectrogram_transformer": Kind(
        "ASTForAudioClassification",
        {**IMAGE, "max_length": 2 * LENGTH, "num_mel_bins": 32},
        both(normal(input_values=(BATCH, 2 * LENGTH, 32)), whole(2, labels=(BATCH,))),
    ),
    "clap": Kind(
        "ClapModel",
        {
            "text_config": tower("ClapTextConfig", {**TEXT, **SPECIAL, "projection_dim": 32}),
            "audio_config": tower(
                "ClapAudioConfig",
                {"num_mel_bins": 16, "spec_size": 64, "window_size": 4, "patch_embeds_hidden_size": 16}
                | {"hidden_size": 32, "depths": [1, 1], "num_attention_heads": [2, 2], "num_hidden_layers": 2}
                | {"projection_dim": 32},
            ),
            "projection_dim": 32,
        },
        both(lambda made: {"input_ids": words(made)}, normal(input_features=(BATCH, 1, 256, 16))),
        flags={"return_loss": True},
    ),
    "dac": Averaged(
        "DacModel",
        {"encoder_hidden_size": 8, "downsampling_ratios": [2, 4], "decoder_hidden_size": 32, "n_codebooks": 2}
        | {"codebook_size": 16, "upsampling_ratios": [4, 2], "quantizer_dropout": 0.5},
        normal(input_values=(BATCH, 1, 512)),
    ),
    "encodec": Against(
        "EncodecModel",
        {"hidden_size": 32, "num_filters": 4, "upsampling_ratios": [4, 2], "codebook_size": 16, "codebook_dim": 32}
        | {"target_bandwidths": [24.0], "sampling_rate": 1000},
        normal(input_values=(BATCH, 1, 512), labels=(BATCH, 1, 512)),
        output="audio_values",
    ),
    "fastspeech2_conformer": Kind(
        "FastSpeech2ConformerModel",
        {"hidden_size": 32, "vocab_size": WORDS, "num_mel_bins": 16, "encoder_layers": 1, "decoder_layers": 1}
        | {"encoder_linear_units": 32, "decoder_linear_units": 32, "speech_decoder_postnet_units": 16}
        | {"duration_predictor_channels": 16, "energy_predictor_channels": 16, "pitch_predictor_channels": 16},
        spoken,
    ),
    "moonshine": Kind(
        "MoonshineForConditionalGeneration",
        {**SPECIAL, "vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 128, "decoder_start_token_id": 1}
        | {
            f"{half}_{of}": size
            for half in ("encoder", "decoder")
            for of, size in (("num_hidden_layers", 2), ("num_attention_heads", 4), ("num_key_value_heads", 4))
        },
        sounds,
        padded_sounds,
    ),
    "parakeet": Kind(
        "ParakeetForCTC",
        {
            "encoder_config": tower(
                "ParakeetEncoderConfig",
                {**TEXT, "subsampling_factor": 4, "subsampling_conv_channels": 16, "num_mel_bins": 80},
            ),
            **{"vocab_size": WORDS, "pad_token_id": 0},
        },
        padded(both(features, normal(input_features=(BATCH, LENGTH, 80)))),
    ),
    "sew": speech("SEW", **SQUEEZED),
    "sew_d": speech("SEWD", **SQUEEZED, position_buckets=16, max_position_embeddings=64),
    "speech_to_text": Kind(
        "Speech2TextForConditionalGeneration",
        {**PAIR, "max_source_positions": 2 * LENGTH, "max_target_positions": 64, "conv_channels": 32},
        both(features, lambda made: {"labels": words(made)}),
    ),
    "speecht5": Kind(
        "SpeechT5ForSpeechToText",
        {**SOUND, **PAIR, "feat_extract_norm": "group"},
        sounds,
        padded_sounds,
    ),
    "wav2vec2_bert": Kind(
        "Wav2Vec2BertForCTC", {**SOUND, "feature_projection_input_dim": 80, "output_hidden_size": 64}, features
    ),
    # Series of numbers.
    "decision_transformer": Against(
        "DecisionTransformerModel",
        {"state_dim": 6, "act_dim": 2, "hidden_size": 64, "n_layer": 2, "n_head": 4, "max_ep_len": 64},
        both(
            normal(states=(BATCH, 8, 6), actions=(BATCH, 8, 2), rewards=(BATCH, 8, 1), returns_to_go=(BATCH, 8, 1)),
            normal(labels=(BATCH, 8, 2)),
            whole(64, timesteps=(BATCH, 8)),
        ),
        output="action_preds",
    ),
    "informer": Kind(
        "InformerForPrediction", {"prediction_length": 8, "context_length": 16, "num_time_features": 2}, series
    ),
    "patchtsmixer": Kind("PatchTSMixerForPrediction", {"prediction_length": 8}, forecasts),
    "patchtst": Kind(
        "PatchTSTForPrediction",
        {"prediction_length": 8, "d_model": 32, "ffn_dim": 64, "patch_length": 4, "patch_stride": 4},
        forecasts,
    ),
    "time_series_transformer": Kind(
        "TimeSeriesTransformerForPrediction",
        {"prediction_length": 8, "context_length": 16, "num_time_features": 2},
        series,
    ),
    "timesfm": Listed(
        "TimesFmModelForPrediction",
        {**TEXT, "head_dim": 16, "patch_length": 8, "context_length": 32, "horizon_length": 16},
        normal(past_values=(BATCH, 32), future_values=(BATCH, 16)),
    ),
}
MIXTURES = """
    afmoe axk1 cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 dots1 ernie4_5_moe exaone_moe flex_olmo
    glm4_moe glm4_moe_lite gpt_oss granitemoe granitemoehybrid granitemoeshared hunyuan_v1_moe jamba kimi_linear laguna
    lfm2_moe longcat_flash mellum mimo_v2_flash minimax minimax_m2 nemotron_h phimoe qwen3_moe qwen3_next solar_open
"""
KINDS |= grouped(KINDS, MIXTURES)


# ----------------------------------------------------------------------------------------------------------------- timm

PLAIN = """
     convmixer_1024_20_ks9_p14 cs3darknet_focus_s csatv2 dpn48b
    fasternet_t0 fbnetc_100 gernet_s hardcorenas_a
    legacy_seresnet18 legacy_xception lcnet_035 lcnetv2_small lowformer_b0 caformer_s18
    mixnet_s mnasnet_small mobileone_s0 mobilevitv2_050 nextvit_small rdnet_tiny repghostnet_050 repvit_m0_9
    resnetv2_18 selecsls42 semnasnet_075 shvit_s1 spnasnet_100 starnet_s050 swiftformer_xs tinynet_e tresnet_m
    ese_vovnet19b_slim
"""
OF_A_SIZE = (
    "coatnet_nano_rw_224 gmlp_ti16_224 gcvit_xxtiny nest_tiny swinv2_cr_tiny_224 tnt_s_patch16_224 vitamin_small_224"
)
TIMM: dict[str, tuple[int, dict[str, Any]]] = {  # the side of an image, and what is not the default
    **dict.fromkeys(PLAIN.split(), (64, {})),
    **dict.fromkeys(OF_A_SIZE.split(), (64, {"img_size": 64})),
    "efficientformerv2_s0": (224, {}),
    "halonet26t": (256, {}),
    "botnet26t_256": (256, {}),
    "hieradet_small": (64, {}),
    "naflexvit_base_patch16_gap": (64, {"depth": 2}),
    "inception_resnet_v2": (96, {}),
    "inception_v4": (96, {}),
    "lambda_resnet26rpt_256": (256, {}),
    "nasnetalarge": (96, {}),
    "pnasnet5large": (96, {}),
    "samvit_base_patch16_224": (64, {"img_size": 64, "depth": 3}),
    "visformer_tiny": (224, {}),
    "vit_tiny_r_s16_p8_224": (64, {"img_size": 64, "depth": 4}),
}
ROWS: dict[str, Row] = {
    **{f"transformers/{name}": row for kind_name, kind in KINDS.items() for name, row in kind.rows(kind_name).items()},
    **{
        f"timm/{name}": Row("timm", lambda name=name, flags=flags: timm_model(name, **flags), images(side), classify)
        for name, (side, flags) in TIMM.items()
    },
}
