"""The rows of tests/benchmarks/zoo.py that are of transformers: tiny configs with default flags, padded, with LoRA.

Each class gives up to three rows: as it is, with a padding mask ("padded"), and with adapters of
peft in its attention ("LoRA"), where only these are trained. Losses are those that the models compute themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from zoo_models import Batch, Row, Sample

WORDS, LENGTH, BATCH, SIDE = 128, 32, 4, 32
PADDING = (0, 9, 0, 17)  # words at the end of each row that are none
BASIC = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 128}
TEXT = {**BASIC, "vocab_size": WORDS}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {**TEXT, **SPECIAL, "num_key_value_heads": 2}
IMAGE = {**BASIC, "image_size": SIDE, "patch_size": 8}
PAIR = {
    **{f"{half}_{name}": size for half in ("encoder", "decoder") for name, size in (("layers", 2), ("ffn_dim", 128))},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "d_model": 64, "vocab_size": WORDS},
    **{**SPECIAL, "decoder_start_token_id": 2, "forced_eos_token_id": None},
}
SOUND = {**BASIC, "conv_dim": (32, 32), "conv_kernel": (10, 4), "conv_stride": (5, 4), "num_feat_extract_layers": 2}
SOUND |= {"vocab_size": WORDS, "pad_token_id": 0, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}


# -------------------------------------------------------------------------------------------------------------- batches


def mask() -> Tensor:
    return torch.stack([(torch.arange(LENGTH) < LENGTH - missing).long() for missing in PADDING])


def words(made: torch.Generator, size: int = WORDS) -> Tensor:
    return torch.randint(3, size, (BATCH, LENGTH), generator=made)


def language(made: torch.Generator) -> Batch:
    tokens = words(made)
    return {"input_ids": tokens, "labels": tokens.clone()}


def translation(made: torch.Generator) -> Batch:
    return {"input_ids": words(made), "labels": words(made)}


def spectrograms(made: torch.Generator) -> Batch:
    return {"input_features": torch.randn(BATCH, 80, 2 * LENGTH, generator=made), "labels": words(made)}


def sounds(made: torch.Generator) -> Batch:
    labels = torch.randint(3, WORDS, (BATCH, 6), generator=made)
    return {"input_values": torch.randn(BATCH, 4000, generator=made), "labels": labels}


def pictures(made: torch.Generator) -> Batch:
    return {
        "pixel_values": torch.randn(BATCH, 3, SIDE, SIDE, generator=made),
        "labels": torch.randint(2, (BATCH,), generator=made),
    }


def unlabelled(made: torch.Generator) -> Batch:
    return {"pixel_values": pictures(made)["pixel_values"]}


def regions(made: torch.Generator) -> Batch:
    return {
        "pixel_values": torch.randn(BATCH, 3, 64, 64, generator=made),
        "labels": torch.randint(2, (BATCH, 64, 64), generator=made),
    }


def captions(made: torch.Generator) -> Batch:
    return {"input_ids": words(made), **unlabelled(made)}


def objects(made: torch.Generator) -> Batch:
    return {
        "pixel_values": torch.randn(2, 3, 64, 64, generator=made),
        "classes": torch.randint(3, (2, 3), generator=made),
        "boxes": 0.2 + 0.3 * torch.rand(2, 3, 4, generator=made),
    }


def padded(sample: Sample) -> Sample:
    """Return what makes the same batch with a mask of its padding, which has no labels."""

    def sample_padded(made: torch.Generator) -> Batch:
        batch = {**sample(made), "attention_mask": mask()}
        if "input_ids" in batch and batch.get("labels", torch.empty(0)).shape == batch["input_ids"].shape:
            batch["labels"] = batch["labels"].masked_fill(mask() == 0, -100)
        return batch

    return sample_padded


def padded_sounds(made: torch.Generator) -> Batch:
    kept = torch.tensor([4000, 3000, 4000, 2000])
    return {**sounds(made), "attention_mask": (torch.arange(4000) < kept[:, None]).long()}


# --------------------------------------------------------------------------------------------------------------- models


@dataclass(frozen=True)
class Kind:
    """A class of transformers.

    Attributes:
        model: the name of the class.
        config: what its config is made with; the class of the config is the model's.
        sample: makes a batch.
        padded: makes a batch with a mask; None where the class takes none.
        adapted: the modules that get an adapter, as the names of them end; () for no such row.
        flags: of the call.
        policy: the precision.
    """

    model: str
    config: dict[str, Any] = field(default_factory=lambda: {**TEXT, **SPECIAL})
    sample: Sample = language
    padded: Sample | None = None
    adapted: tuple[str, ...] = ()
    flags: dict[str, Any] = field(default_factory=dict)
    policy: str = "bfloat16"

    def build(self, adapted: bool = False) -> nn.Module:
        import transformers

        transformers.logging.set_verbosity_error()  # a tiny vocabulary has not the special words of a config's defaults
        model_class = getattr(transformers, self.model)
        config = {name: make() if callable(make) else make for name, make in self.config.items()}
        model: nn.Module = model_class(model_class.config_class(**config))
        if not adapted:
            return model
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(target_modules=list(self.adapted)))  # type: ignore[arg-type]
        return model

    def loss(self, model: nn.Module, **batch: Tensor) -> Tensor:
        loss: Tensor = model(**batch, **self.flags).loss
        return loss

    def rows(self, name: str) -> dict[str, Row]:
        made = {name: Row("transformers", self.build, self.sample, self.loss, policy=self.policy)}
        if self.padded is not None:
            made[f"{name}, padded"] = Row("transformers", self.build, self.padded, self.loss, policy=self.policy)
        if self.adapted:
            made[f"{name}, LoRA"] = Row(
                "transformers", lambda: self.build(adapted=True), self.sample, self.loss, policy=self.policy
            )
        return made


def grouped(kinds: dict[str, Kind], names: str) -> dict[str, Kind]:
    """Return these kinds, mixtures of experts, with the rule that has torch read no sizes of groups on the host."""
    policy = "params=float32,compute=bfloat16,output=float32,ops={grouped_mm:bfloat16}"
    return {f"{name}, grouped": replace(kinds[name], policy=policy, adapted=()) for name in names.split()}


class Detection(Kind):
    """A class whose labels are a list of dicts."""

    def loss(self, model: nn.Module, **batch: Tensor) -> Tensor:
        pairs = zip(batch["classes"], batch["boxes"], strict=True)
        targets = [{"class_labels": classes, "boxes": boxes} for classes, boxes in pairs]
        loss: Tensor = model(pixel_values=batch["pixel_values"], labels=targets).loss
        return loss


def causal(model: str, adapted: tuple[str, ...] = (), **config: Any) -> Kind:
    """Return a language model whose config has the usual names; `config` adds to them."""
    return Kind(f"{model}ForCausalLM", {**GROUPED, **config}, language, padded(language), adapted)


def masked(model: str, adapted: tuple[str, ...] = (), **config: Any) -> Kind:
    return Kind(f"{model}ForMaskedLM", {**TEXT, **SPECIAL, **config}, language, padded(language), adapted)


def translator(model: str, adapted: tuple[str, ...] = (), **config: Any) -> Kind:
    return Kind(f"{model}ForConditionalGeneration", {**PAIR, **config}, translation, padded(translation), adapted)


def named(names: dict[str, str], **more: Any) -> dict[str, Any]:
    """Return the sizes of TEXT under other names, and what is added. Such configs have no padding token by default."""
    return {
        "bos_token_id": 1,
        "eos_token_id": 2,
        **{names.get(name, name): size for name, size in TEXT.items()},
        **more,
    }


def tower(name: str, config: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Return what makes a part of a config as a dict."""

    def make() -> dict[str, Any]:
        import transformers

        made: dict[str, Any] = getattr(transformers, name)(**config).to_dict()
        return made

    return make


def small_backbone() -> Any:
    from transformers import ResNetConfig

    return ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], out_features=["stage2"])


QV, QVP = ("q_proj", "v_proj"), ("query", "value")
GPT = {"hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
GPT |= {"intermediate_size": "n_inner"}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
KINDS = {
    "gpt2": Kind("GPT2LMHeadModel", named(GPT), padded=padded(language), adapted=("c_attn",)),
    "gpt_neo": Kind(
        "GPTNeoForCausalLM",
        {**SPECIAL, "vocab_size": WORDS, "hidden_size": 64, "num_layers": 2, "num_heads": 4}
        | {"attention_types": [[["global", "local"], 1]], "window_size": 8},
        padded=padded(language),
    ),
    "gptj": Kind("GPTJForCausalLM", named(GPT, rotary_dim=8), padded=padded(language)),
    "codegen": Kind("CodeGenForCausalLM", named(GPT, rotary_dim=8), padded=padded(language)),
    "gpt_bigcode": Kind("GPTBigCodeForCausalLM", named(GPT), padded=padded(language)),
    "gpt_neox": causal("GPTNeoX", ("query_key_value",)),
    "llama": causal("Llama", QV),
    "mistral": causal("Mistral", QV, sliding_window=16),
    "qwen2": causal("Qwen2", QV),
    "qwen3": causal("Qwen3", head_dim=16),
    "gemma": causal("Gemma", QV, head_dim=16),
    "gemma2": causal("Gemma2", head_dim=16, sliding_window=16),
    "gemma3": causal("Gemma3", head_dim=16, sliding_window=16),
    "phi": causal("Phi", QV),
    "phi3": causal("Phi3"),
    "stablelm": causal("StableLm"),
    "olmo2": causal("Olmo2"),
    "cohere": causal("Cohere"),
    "granite": causal("Granite"),
    "smollm3": causal("SmolLM3"),
    "starcoder2": causal("Starcoder2"),
    "opt": causal("OPT", QV, ffn_dim=128, word_embed_proj_dim=64),
    "bloom": Kind("BloomForCausalLM", named(GPT), padded=padded(language), adapted=("query_key_value",)),
    "falcon": causal("Falcon", ("query_key_value",)),
    "mpt": Kind(
        "MptForCausalLM",
        {**SPECIAL, "vocab_size": WORDS, "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
        padded=padded(language),
    ),
    "mamba": Kind("MambaForCausalLM", {**TEXT, **SPECIAL, "state_size": 8}),
    "mamba2": Kind(
        "Mamba2ForCausalLM", {**TEXT, **SPECIAL, "state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 1}
    ),
    "rwkv": Kind("RwkvForCausalLM", {**TEXT, **SPECIAL, "attention_hidden_size": 64}),
    "recurrent_gemma": causal("RecurrentGemma", num_hidden_layers=3, attention_window_size=16),
    "mixtral": causal("Mixtral", QV, num_local_experts=4),
    "qwen2_moe": causal("Qwen2Moe", num_experts=4, shared_expert_intermediate_size=64, **EXPERTS),
    "olmoe": causal("Olmoe", num_experts=4, num_experts_per_tok=2),
    "bert": masked("Bert", QVP),
    "roberta": masked("Roberta", QVP),
    "camembert": masked("Camembert"),
    "distilbert": Kind(
        "DistilBertForMaskedLM",
        {"vocab_size": WORDS, "dim": 64, "n_heads": 4, "n_layers": 2, "hidden_dim": 128},
        padded=padded(language),
        adapted=("q_lin", "v_lin"),
    ),
    "albert": masked("Albert", embedding_size=32),
    "electra": masked("Electra", QVP, embedding_size=32),
    "deberta_v2": masked("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "mpnet": masked("MPNet"),
    "modernbert": masked("ModernBert", cls_token_id=1, sep_token_id=2),
    "convbert": masked("ConvBert", embedding_size=32),
    "squeezebert": masked("SqueezeBert", embedding_size=64),
    "roformer": masked("RoFormer", embedding_size=32),
    "fnet": Kind("FNetForMaskedLM", {**TEXT, **SPECIAL}, policy="float32"),  # no FFT in bfloat16
    "funnel": Kind(
        "FunnelForMaskedLM",
        {"vocab_size": WORDS, "d_model": 64, "n_head": 4, "d_head": 16, "d_inner": 128, "block_sizes": [1, 1]},
        padded=padded(language),
    ),
    "longformer": masked("Longformer", attention_window=[8, 8]),
    "xlnet": Kind(
        "XLNetLMHeadModel",
        {**SPECIAL, "vocab_size": WORDS, "d_model": 64, "n_head": 4, "n_layer": 2, "d_inner": 128},
        padded=padded(language),
    ),
    "t5": Kind(
        "T5ForConditionalGeneration",
        {"vocab_size": WORDS, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
        | {"decoder_start_token_id": 0},
        translation,
        padded(translation),
        ("q", "v"),
    ),
    "switch_transformers": Kind(
        "SwitchTransformersForConditionalGeneration",
        {"vocab_size": WORDS, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
        | {"num_decoder_layers": 2, "num_experts": 4, "decoder_start_token_id": 0},
        translation,
        padded(translation),
    ),
    "bart": translator("Bart", QV),
    "pegasus": translator("Pegasus"),
    "mbart": translator("MBart"),
    "m2m_100": translator("M2M100"),
    "blenderbot": translator("Blenderbot"),
    "led": translator("LED", attention_window=[8, 8]),
    "whisper": Kind(
        "WhisperForConditionalGeneration", {**PAIR, "max_source_positions": LENGTH}, spectrograms, adapted=QV
    ),
    "wav2vec2": Kind("Wav2Vec2ForCTC", SOUND, sounds, padded_sounds, QV),
    "hubert": Kind("HubertForCTC", SOUND, sounds, padded_sounds),
    "wavlm": Kind("WavLMForCTC", SOUND, sounds, padded_sounds),
    "vit": Kind("ViTForImageClassification", IMAGE, pictures, adapted=QV),
    "deit": Kind("DeiTForImageClassification", IMAGE, pictures),
    "beit": Kind("BeitForImageClassification", IMAGE, pictures),
    "dinov2": Kind("Dinov2ForImageClassification", IMAGE, pictures),
    "swin": Kind(
        "SwinForImageClassification",
        {"image_size": SIDE, "patch_size": 4, "embed_dim": 32, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4},
        pictures,
    ),
    "convnext": Kind(
        "ConvNextForImageClassification", {"num_stages": 2, "hidden_sizes": [16, 32], "depths": [1, 1]}, pictures
    ),
    "vit_mae": Kind(
        "ViTMAEForPreTraining",
        {**IMAGE, "decoder_hidden_size": 32, "decoder_num_attention_heads": 4, "decoder_num_hidden_layers": 2}
        | {"decoder_intermediate_size": 64},
        unlabelled,
    ),
    "segformer": Kind(
        "SegformerForSemanticSegmentation",
        {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1], "decoder_hidden_size": 32},
        regions,
    ),
    "clip": Kind(
        "CLIPModel",
        {
            "text_config": tower("CLIPTextConfig", {**TEXT, **SPECIAL}),
            "vision_config": tower("CLIPVisionConfig", IMAGE),
            "projection_dim": 32,
        },
        captions,
        padded(captions),
        QV,
        {"return_loss": True},
    ),
    "siglip": Kind(
        "SiglipModel",
        {
            "text_config": tower("SiglipTextConfig", {**TEXT, **SPECIAL, "projection_size": 64}),
            "vision_config": tower("SiglipVisionConfig", IMAGE),
        },
        captions,
        padded(captions),
        flags={"return_loss": True},
    ),
    "detr": Detection(
        "DetrForObjectDetection",
        {key: value for key, value in PAIR.items() if key not in ("vocab_size", *SPECIAL, "decoder_start_token_id")}
        | {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "num_queries": 8}
        | {"backbone_config": small_backbone, "num_labels": 3},
        objects,
    ),
}
KINDS |= grouped(KINDS, "mixtral qwen2_moe olmoe")
ROWS: dict[str, Row] = {
    f"transformers/{name}": row for kind_name, kind in KINDS.items() for name, row in kind.rows(kind_name).items()
}
