"""Flags of the model architecture, and the sizes that follow from them."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

from megatron.arguments import Needs, arg
from megatron.config.moe import ROUTER_SUMS, MoEConfig, parse_layer_pattern
from megatron.config.mup import MupConfig
from megatron.config.rope import LongRope, Rope, Yarn


def _norm(word: str) -> str:
    """Megatron-DeepSpeed writes `rmsnorm`."""
    return {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}.get(word.lower(), word)


ROPE = Needs("--position-embedding-type rope", lambda v: v.config.model.rotates)
_MLA = "multi_latent_attention"
_NO_MLA = Needs(
    "keys and values of their own (--multi-latent-attention is given)", lambda v: not v[_MLA]
)
_DELTA = Needs("a gated delta net", lambda v: v.config.model.delta_layers is not None)
_YARN = Needs(
    "--position-embedding-type yarn, or rope with --rope-type yarn",
    lambda v: v.config.model.has_yarn,
)
_LONGROPE = Needs(
    "--rope-type longrope, with rotary positions",
    lambda v: v.config.model.longrope is not None,
)
_LENGTHENED = Needs(
    "--rope-type yarn or longrope",
    lambda v: v.config.model.has_yarn or v.config.model.longrope is not None,
)
_GATED = Needs("a gated MLP (--swiglu, --geglu or --quick-geglu)", lambda v: v.config.model.gated)
_SIGMOID_GLU = Needs(
    "--swiglu or --quick-geglu", lambda v: v.config.model.activation in ("swiglu", "quick_geglu")
)
_NO_BIASES = Needs(
    "--disable-bias-linear: all linear layers have biases", lambda v: not v["add_bias_linear"]
)
# Flags of one part of a model.
_latent = functools.partial(arg, needs=_MLA, trained="latents")
_delta = functools.partial(arg, needs=_DELTA, trained="delta_sizes")
_yarn = functools.partial(arg, needs=_YARN, trained="yarn")
_longrope = functools.partial(arg, needs=_LONGROPE, trained="longrope")


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Embeddings, attention, norms and dense MLPs."""

    num_layers: int = arg(
        None,
        missing="give the number of transformer layers",
        minimum=1,
        maximum=10_000,
        trained=True,
        alias=("--encoder-num-layers",),
    )
    """number of transformer layers"""

    hybrid_layer_pattern: str | None = arg(
        None,
        excludes=("moe_layer_freq", "use_parallel_residual", "linear_attention_freq"),
        trained="layer_symbols",
        alias=("--hybrid-override-pattern",),
    )
    """layers of one block each, a letter for each: * attention, G gated delta net, - MLP, E
    experts; | between (virtual) pipeline stages; behind / the blocks of each module of multi-token
    prediction, as in *-*-|*E*E/*E (default: layers of attention and an MLP or experts)"""

    hidden_size: int = arg(None, missing="give the width of the model", minimum=1, trained=True)
    """hidden size (width of the residual stream)"""

    ffn_hidden_size: int | None = arg(None, minimum=1, trained="ffn")
    """MLP hidden size (default: 4 x hidden size, or with a gated MLP such as --swiglu 8/3 x hidden
    size rounded down to a multiple of 64)"""

    ffn_multiple_of: int | None = arg(
        None, requires=_GATED, excludes=("ffn_hidden_size",), minimum=1, trained="ffn"
    )
    """with a gated MLP, instead of --ffn-hidden-size: MLP hidden size is 8/3 x hidden size rounded
    UP to a multiple of this"""

    num_attention_heads: int = arg(
        None, missing="give the number of query heads", minimum=1, trained=True
    )
    """number of attention (query) heads"""

    kv_channels: int | None = arg(None, needs=_NO_MLA, minimum=1, trained="head_dim")
    """head width (default: hidden size / number of attention heads)"""

    group_query_attention: bool = arg(False, needs=_NO_MLA, trained="query_groups")
    """grouped-query attention (GQA)"""

    num_query_groups: int = arg(1, needs=_NO_MLA, minimum=1, trained="query_groups")
    """number of key/value heads, with --group-query-attention"""

    multi_latent_attention: bool = arg(
        False,
        excludes=(
            *("rotary_interleaved", "rotary_percent", "rotary_seq_len_interpolation_factor"),
            *("no_rope_freq", "use_rope_scaling", "window_size", "use_mup", "softmax_scale"),
            *("softmax_type", "attn_logit_softcapping", "qk_layernorm_all_heads"),
            "qk_layernorm_after_rope",
        ),
        trained=True,
    )
    """multi-head latent attention (MLA, DeepSeek-V2): keys and values of all heads are made of one
    narrow latent, beside one rotary key"""

    q_lora_rank: int | None = _latent(None, minimum=1)
    """MLA: width of the latent of queries (default: none, queries are made of the hidden states)"""

    kv_lora_rank: int = _latent(32, minimum=1)
    """MLA: width of the latent of keys and values; Megatron-LM's MLATransformerConfig has 512"""

    qk_head_dim: int = _latent(128, minimum=1)
    """MLA: channels of a head of queries and keys without rotary positions"""

    qk_pos_emb_head_dim: int = _latent(64, minimum=2)
    """MLA: channels of a head of queries with rotary positions, beside those; the keys of all heads
    share them"""

    v_head_dim: int = _latent(128, minimum=1)
    """MLA: channels of a head of values"""

    latent_norm_epsilon: float | None = arg(
        None, needs=[_MLA, "qk_layernorm"], above=0, trained="latents"
    )
    """MLA: epsilon of the norms of latents (default: --norm-epsilon); 1e-6 in Hugging Face's
    DeepSeek models"""

    experimental_attention_variant: Literal["gated_delta_net"] | None = arg(
        None, requires="linear_attention_freq", trained="delta_layers"
    )
    """what the layers of --linear-attention-freq have in the place of attention: gated_delta_net
    (Qwen3-Next), a state of fixed size that each token rewrites; its activations are SiLU, whatever
    those of the MLP are"""

    linear_attention_freq: str | None = arg(
        None, needs="experimental_attention_variant", trained="delta_layers"
    )
    """which layers have that: N for all but every Nth layer, or a pattern of 1 (gated delta net)
    and 0 (attention) such as [1,1,1,0]*12"""

    linear_conv_kernel_dim: int = _delta(4, minimum=1, maximum=64)
    """gated delta net: tokens, itself the last, that the convolution of a token sees"""

    linear_key_head_dim: int = _delta(128, minimum=1)
    """gated delta net: channels of a head of queries and keys"""

    linear_value_head_dim: int = _delta(128, minimum=1)
    """gated delta net: channels of a head of values and gates"""

    linear_num_key_heads: int = _delta(16, minimum=1)
    """gated delta net: heads of queries and keys"""

    linear_num_value_heads: int = _delta(32, minimum=1)
    """gated delta net: heads of values and gates, a multiple of --linear-num-key-heads"""

    seq_length: int = arg(
        None, missing="give the tokens of one sample", minimum=1, alias=("--encoder-seq-length",)
    )
    """sequence length: tokens per sample"""

    max_position_embeddings: int = arg(
        None, missing="give at least --seq-length", minimum=1, trained="position_rows"
    )
    """number of positions (rows of a learned position table), at least --seq-length"""

    position_embedding_type: Literal["learned_absolute", "rope", "yarn", "none"] = arg(
        "learned_absolute", trained="positions"
    )
    """position embeddings; yarn: rope with --rope-type yarn"""

    use_rotary_position_embeddings: bool = arg(False, trained="positions")
    """the same as --position-embedding-type rope"""

    add_position_embedding: bool = arg(True, trained="positions", off="--no-position-embedding")
    """no learned position table: the same as --position-embedding-type none (or rope, if
    requested)"""

    rotary_base: int = arg(10000, needs=ROPE, minimum=1, trained=True)
    """base of the rotary frequencies"""

    rotary_percent: float = arg(1.0, needs=ROPE, above=0, maximum=1, trained=True)
    """fraction of each head's width to which rotary position embeddings are applied"""

    rotary_interleaved: bool = arg(False, needs=ROPE, trained=True)
    """rotary position embeddings rotate neighbouring pairs instead of the two halves of a head"""

    rotary_seq_len_interpolation_factor: int | None = arg(None, needs=ROPE, minimum=1, trained=True)
    """divide rotary positions by this (position interpolation)"""

    rotary_ntk_alpha: float = arg(1.0, above=0, needs=ROPE, trained=True)
    """NTK-aware scaling: the base of the rotary frequencies is multiplied by this to the power of d
    / (d - 2), d rotated channels of a head (Hunyuan)"""

    use_rope_scaling: bool = arg(False, needs=ROPE, trained="rope_scaling")
    """Llama 3.1's RoPE scaling: frequencies with wavelengths above 8,192 positions are divided by
    --rope-scaling-factor"""

    rope_scaling_factor: float = arg(8.0, above=0, needs="use_rope_scaling", trained="rope_scaling")
    """with --use-rope-scaling: factor by which low rotary frequencies are divided"""

    rope_type: Literal["rope", "yarn", "longrope"] | None = arg(None, needs=ROPE, trained="yarn")
    """rotary frequencies as they are, or slowed for a longer context as YaRN does, by
    --rotary-scaling-factor, or LongRoPE, by --longrope-short-factor and --longrope-long-factor
    (default: rope, with MLA yarn)"""

    longrope_short_factor: tuple[float, ...] | None = _longrope(None)
    """LongRoPE: what each rotary frequency is divided by, in sequences of up to
    --original-max-position-embeddings tokens; generation counts all tokens there may be"""

    longrope_long_factor: tuple[float, ...] | None = _longrope(None)
    """LongRoPE: the same in longer sequences"""

    longrope_attention_factor: float = _longrope(1.0, above=0)
    """LongRoPE: rotated queries and keys are multiplied by this"""

    rotary_scaling_factor: float = _yarn(1.0, above=0, alias=("--yarn-rotary-scaling-factor",))
    """YaRN: by how much the context is longer than --original-max-position-embeddings;
    Megatron-LM's MLATransformerConfig has 40"""

    original_max_position_embeddings: int = arg(
        4096,
        minimum=1,
        needs=_LENGTHENED,
        trained="yarn",
        alias=("--yarn-original-max-position-embeddings",),
    )
    """YaRN, LongRoPE: positions of the context before it was lengthened"""

    beta_fast: float = _yarn(32.0, above=0, alias=("--yarn-beta-fast",))
    """YaRN: frequencies with more turns than this in that context stay"""

    beta_slow: float = _yarn(1.0, above=0, alias=("--yarn-beta-slow",))
    """YaRN: frequencies with fewer turns are divided by --rotary-scaling-factor"""

    mscale: float = _yarn(1.0, minimum=0, alias=("--yarn-mscale",))
    """YaRN: rotated queries and keys are multiplied by 1 + 0.1 x this x ln of the factor, divided
    by the same with --mscale-all-dim"""

    mscale_all_dim: float = _yarn(0.0, minimum=0, alias=("--yarn-mscale-all-dim",))
    """YaRN: see --mscale; with MLA attention scores are multiplied by the square of 1 + 0.1 x this
    x ln of the factor"""

    yarn_correction_range_round_to_int: bool = _yarn(
        True, off="--no-yarn-correction-range-round-to-int"
    )
    """YaRN: the channels between which frequencies go over are not rounded to whole ones"""

    no_rope_freq: str | None = arg(None, needs=ROPE, trained="unrotated_layers")
    """layers without rotary position embeddings (NoPE): N for every Nth layer, or a pattern of 1
    (without) and 0 (with) such as [0]*3+[1]*1 (default: none)"""

    window_size: tuple[int, ...] | None = arg(None, nargs=2, minimum=0, trained="window")
    """sliding-window attention: a token sees itself and so many tokens before it, and so many
    behind it, of which there must be 0, e.g. 127 0 (default: all before it); sliding_window of
    Hugging Face counts the token itself, too: there it is 128"""

    window_attn_skip_freq: str | None = arg(
        None, needs="window_size", trained="full_attention_layers"
    )
    """layers without the window of --window-size: N for every Nth layer, or a pattern of 1 (window)
    and 0 (all tokens) such as [1,1,1,0]*8 (default: none)"""

    cp_comm_type: tuple[str, ...] = arg(
        ("p2p",), needs="context_parallel_size", choices=("p2p", "all_gather", "a2a", "a2a+p2p")
    )
    """context-parallel communication of attention, one for all layers or one for each: p2p (keys
    and values go round a ring), all_gather (of keys and values), a2a (each rank gets the whole
    sequence of some heads) or a2a+p2p (a2a among neighbours, p2p between such groups; see
    --hierarchical-context-parallel-sizes)"""

    window_rotary_base: int | None = arg(
        None, needs=[ROPE, "window_size"], minimum=1, trained="window_base"
    )
    """base of the rotary frequencies in layers with a window, where they are then neither scaled
    nor interpolated (default: the rotary positions of the other layers)"""

    make_vocab_size_divisible_by: int = arg(128, minimum=1)
    """pad the vocabulary size to a multiple of this x tensor-parallel size"""

    normalization: Literal["LayerNorm", "RMSNorm"] = arg("LayerNorm", trained=True, parse=_norm)
    """type of all norms"""

    norm_epsilon: float = arg(1e-5, above=0, trained=True)
    """epsilon of the norms"""

    apply_layernorm_1p: bool = arg(False, trained=True)
    """store norm weights minus one (zero-centered)"""

    apply_residual_connection_post_layernorm: bool = arg(False, trained=True)
    """take the residual connection after the norm instead of before it"""

    use_parallel_residual: bool = arg(
        False, excludes=("apply_residual_connection_post_layernorm",), trained=True
    )
    """attention and MLP of a layer both read the layer's input, and both results are added to it
    (GPT-NeoX, Pythia)"""

    no_pre_layernorm: bool = arg(
        False,
        requires=["post_self_attn_layernorm", "post_mlp_layernorm"],
        excludes=("apply_residual_connection_post_layernorm", "fp32_residual_connection"),
        trained=True,
    )
    """no norms before attention and MLP (OLMo 2); needs --post-self-attn-layernorm and
    --post-mlp-layernorm"""

    post_self_attn_layernorm: bool = arg(False, trained=True)
    """a norm of the attention output before the residual connection"""

    post_mlp_layernorm: bool = arg(False, trained=True)
    """a norm of the MLP output before the residual connection"""

    embedding_multiplier: float = arg(1.0, above=0, trained="embedding_factors")
    """factor on the output of the word embedding, rounded to the dtype of the weights (Granite;
    Gemma: square root of the hidden size)"""

    residual_multiplier: float = arg(1.0, above=0, trained=True)
    """factor on the attention and MLP outputs before the residual connection (Granite)"""

    softmax_scale: float | None = arg(None, above=0, trained="attention_scale")
    """factor on attention scores (default: 1 / square root of the head width; with --use-mup 1 /
    head width)"""

    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = arg("vanilla", trained=True)
    """the softmax of attention has one more score, of no value, in its denominator: with off-by-one
    it is 0, with learnable a parameter of each query head (attention sinks, gpt-oss)"""

    attn_logit_softcapping: float | None = arg(None, above=0, trained=True)
    """attention scores x become this times tanh(x / this) (Gemma 2; default: no cap)"""

    logits_scaling: float = arg(1.0, above=0, trained="logits_divisor")
    """the logits are divided by this (Granite)"""

    final_logit_softcapping: float | None = arg(None, above=0, trained=True)
    """the logits x become this times tanh(x / this) (Gemma 2; default: no cap)"""

    mtp_num_layers: int | None = arg(
        None,
        minimum=1,
        maximum=64,
        requires=Needs(
            "--position-embedding-type rope or none, as in Megatron-LM",
            lambda v: v.config.model.positions != "learned_absolute",
        ),
        excludes=("use_mup", "logits_scaling", "enable_cuda_graph", "cuda_graph_impl"),
    )
    """multi-token prediction (DeepSeek-V3): this many modules behind the decoder, each of which
    predicts one token further"""

    mtp_loss_scaling_factor: float = arg(0.1, minimum=0, needs="mtp_num_layers")
    """factor on the mean of the losses of --mtp-num-layers, which is added to the loss"""

    qk_layernorm: bool = arg(False, trained=True)
    """normalize each head of queries and keys; with MLA their latents"""

    attention_output_gate: bool = arg(False, excludes=("multi_latent_attention",), trained=True)
    """multiply the result of each attention head by the sigmoid of a gate, another head of
    linear_qkv (Qwen3-Next)"""

    qk_layernorm_all_heads: bool = arg(
        False,
        requires=Needs(
            "--normalization RMSNorm",
            lambda v: v["normalization"] == "RMSNorm" or not v["qk_layernorm"],
        ),
        needs="qk_layernorm",
        trained=True,
    )
    """with --qk-layernorm: one RMSNorm over all query heads together and one over all key heads,
    instead of one per head (OLMo 2, OLMoE)"""

    qk_layernorm_after_rope: bool = arg(False, needs=[ROPE, "qk_layernorm"], trained=True)
    """with --qk-layernorm: normalize queries and keys after their rotation (Hunyuan)"""

    openai_gelu: bool = arg(
        False, excludes=("swiglu", "geglu", "squared_relu", "xielu"), trained="activation"
    )
    """tanh approximation of GELU, also with --no-bias-gelu-fusion"""

    squared_relu: bool = arg(False, excludes=("swiglu", "geglu"), trained="activation")
    """squared ReLU activation in the MLP"""

    swiglu: bool = arg(False, trained="activation")
    """SwiGLU: gated MLP with SiLU"""

    geglu: bool = arg(False, excludes=("swiglu",), trained="activation")
    """GEGLU: gated MLP with GELU"""

    quick_geglu: bool = arg(
        False,
        excludes=("swiglu", "geglu", "squared_relu", "xielu", "openai_gelu"),
        trained="activation",
    )
    """gated MLP with x sigmoid(1.702 x) in the place of GELU (gpt-oss)"""

    activation_func_clamp_value: float | None = arg(
        None, above=0, requires=_SIGMOID_GLU, trained=True
    )
    """with --swiglu or --quick-geglu: before the activation function the gate is clamped from
    above, the up half from both sides (gpt-oss: 7)"""

    glu_linear_offset: float = arg(0.0, requires=_SIGMOID_GLU, trained=True)
    """with --swiglu or --quick-geglu: added to the up half, behind its clamp (gpt-oss: 1)"""

    xielu: bool = arg(False, excludes=("swiglu", "geglu", "squared_relu"), trained="activation")
    """xIELU activation in the MLP, with two learnt scalars per layer (Apertus)"""

    bias_gelu_fusion: bool = arg(
        True,
        needs=Needs(
            "a GELU with biases",
            lambda v: v["add_bias_linear"] and v.config.model.activation.startswith("gelu"),
        ),
        trained="activation",
        off="--no-bias-gelu-fusion",
    )
    """exact (erf) GELU instead of the tanh approximation of Megatron's fused bias + GELU"""

    untie_embeddings_and_output_weights: bool = arg(False, trained=True)
    """untied embeddings: the output layer has its own weight"""

    add_bias_linear: bool = arg(True, trained="biases", off="--disable-bias-linear")
    """no biases in linear layers"""

    add_qkv_bias: bool = arg(False, needs=[_NO_BIASES, _NO_MLA], trained="biases")
    """bias of the query/key/value projection even with --disable-bias-linear"""

    add_attention_output_bias: bool = arg(False, needs=_NO_BIASES, trained="biases")
    """bias of the attention output projection even with --disable-bias-linear"""

    add_mlp_bias: bool = arg(False, needs=_NO_BIASES, trained="biases")
    """biases of the MLP even with --disable-bias-linear"""

    attention_dropout: float = arg(0.1, minimum=0, below=1)
    """dropout probability of the attention probabilities; masks follow from seed, iteration and
    rank, so another layout has others"""

    hidden_dropout: float = arg(0.1, minimum=0, below=1)
    """dropout probability of the embedding and of both residual branches, with masks as
    --attention-dropout"""

    init_method_std: float = arg(
        0.02,
        needs=[
            ("init_scheme", "megatron"),
            Needs(
                "normal initial values (--init-method-xavier-uniform is given)",
                lambda v: not v["init_method_xavier_uniform"],
            ),
        ],
        above=0,
    )
    """standard deviation of normally distributed initial values"""

    init_method_xavier_uniform: bool = arg(False, needs=("init_scheme", "megatron"))
    """Xavier uniform initial values of matrices"""

    init_scheme: str = arg("megatron", choices=("megatron",), per_run=True, requires=_GATED)
    """initial values of matrices"""

    embed_grad_scale: float = arg(1.0, above=0)
    """factor on the gradients of the embedding and the output layer (GLM-130B)"""

    label_smoothing: float = arg(0.0, minimum=0, below=1)
    """label smoothing factor, in training; losses of subsets are without it"""

    z_loss_coeff: float = arg(0.0, minimum=0, excludes=("label_smoothing",))
    """coefficient of the z-loss of the output logits, the mean square of the logarithm of the
    softmax's denominator, e.g. 1e-4; logged as output_z_loss, and no part of lm loss"""

    apply_query_key_layer_scaling: bool = arg(
        False, no_effect="it changes no number (the softmax is always in fp32)"
    )
    """divide attention scores by the layer number and undo it in the softmax; no numerical effect
    in this suite"""

    attention_softmax_in_fp32: bool = arg(False, no_effect="the softmax is always computed in fp32")
    """attention softmax in fp32 (always so in this suite)"""

    fp32_residual_connection: bool = arg(
        False, requires=Needs("--fp16 or --bf16", lambda v: v["fp16"] or v["bf16"])
    )
    """keep the residual stream in fp32, with --fp16 or --bf16"""

    def __post_init__(self) -> None:
        """A pattern of layers says their numbers, where these are not given."""
        if self.hybrid_layer_pattern is not None:
            main, *depths = self.pattern_parts
            for name, number in (("num_layers", len(main)), ("mtp_num_layers", len(depths))):
                if getattr(self, name) is None and number:
                    object.__setattr__(self, name, number)

    @property
    def pattern_parts(self) -> list[str]:
        """Of --hybrid-layer-pattern the letters of the layers, and those of each module of
        multi-token prediction."""
        return (self.hybrid_layer_pattern or "").replace("|", "").split("/")

    @property
    def layer_symbols(self) -> str | None:
        """The letters of the layers; None without a pattern."""
        return None if self.hybrid_layer_pattern is None else self.pattern_parts[0]

    @property
    def residual_branches(self) -> int:
        """How many blocks add to the residual stream."""
        return self.num_layers * (2 if self.hybrid_layer_pattern is None else 1)

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def filled_in(self) -> dict[str, int | str]:
        """The flags whose values follow from others, as Megatron's checks fill them in."""
        return {
            "ffn_hidden_size": self.ffn,
            "kv_channels": self.head_dim,
            "position_embedding_type": self.positions,
        }

    def rope(self, layer: int) -> Rope | None:
        """Rotary positions of the layer of this (global) number; None without."""
        if not self._rotates(layer):
            return None
        latent = self.multi_latent_attention
        channels = self.qk_pos_emb_head_dim if latent else self.head_dim
        width = int(channels * self.rotary_percent)
        if self.window_rotary_base is not None and self.window_of(layer) is not None:
            return Rope(width, self.window_rotary_base, self.rotary_interleaved)
        return Rope(
            width,
            self.rotary_base * self.rotary_ntk_alpha ** (width / max(width - 2, 1)),
            self.rotary_interleaved or latent,
            self.rotary_seq_len_interpolation_factor,
            self.rope_scaling,
            self.yarn,
            self.longrope,
        )

    @property
    def rotates(self) -> bool:
        """Have layers rotary positions? Latent attention has, whatever the embedding has."""
        return self.positions == "rope" or self.multi_latent_attention

    def _rotates(self, layer: int) -> bool:
        if not self.rotates or self.no_rope_freq is None:
            return self.rotates
        if self.no_rope_freq.isdecimal():
            return (layer + 1) % int(self.no_rope_freq) != 0
        return not parse_layer_pattern(self.no_rope_freq)[layer]

    def is_delta_layer(self, layer: int) -> bool:
        """Has the layer of this (global) number a gated delta net in the place of attention?"""
        freq = self.linear_attention_freq
        if self.experimental_attention_variant is None or freq is None:
            return False
        if freq.isdecimal():
            return (layer + 1) % int(freq) != 0
        return parse_layer_pattern(freq)[layer]

    @property
    def delta_layers(self) -> list[bool] | None:
        """Layer by layer, has it a gated delta net? None where none has."""
        layers = [self.is_delta_layer(layer) for layer in range(self.num_layers)]
        return layers if any(layers) else None

    @property
    def delta_sizes(self) -> tuple[int, ...] | None:
        """Those of gated delta nets; None without."""
        if self.delta_layers is None:
            return None
        return (
            self.linear_conv_kernel_dim,
            self.linear_key_head_dim,
            self.linear_value_head_dim,
            self.linear_num_key_heads,
            self.linear_num_value_heads,
        )

    def window_of(self, layer: int) -> int | None:
        """How many tokens, itself among them, a token sees in the layer of this (global) number;
        None: all before it."""
        if self.window_size is None or self._is_full(layer):
            return None
        return self.window_size[0] + 1

    def comm_type_of(self, layer: int) -> str:
        """--cp-comm-type of the layer of this (global) number."""
        return self.cp_comm_type[layer % len(self.cp_comm_type)]

    def _is_full(self, layer: int) -> bool:
        if self.window_attn_skip_freq is None:
            return False
        if self.window_attn_skip_freq.isdecimal():
            return (layer + 1) % int(self.window_attn_skip_freq) == 0
        return not parse_layer_pattern(self.window_attn_skip_freq)[layer]

    @property
    def window(self) -> int | None:
        """What a token sees in the layers with a window; None where there are none."""
        windows = (self.window_of(layer) for layer in range(self.num_layers))
        return next((window for window in windows if window is not None), None)

    @property
    def full_attention_layers(self) -> list[int]:
        """The layers without a window, of a model that has one in others."""
        if self.window is None:
            return []
        return [layer for layer in range(self.num_layers) if self._is_full(layer)]

    @property
    def query_groups(self) -> int:
        """Key/value heads: as many as query heads without GQA, and with latent attention."""
        grouped = self.group_query_attention and not self.multi_latent_attention
        return self.num_query_groups if grouped else self.num_attention_heads

    @property
    def unrotated_layers(self) -> list[int]:
        """The layers without rotary positions, of a model that has them in others."""
        rope = self.positions == "rope"
        return [layer for layer in range(self.num_layers) if rope and not self._rotates(layer)]

    @property
    def rope_scaling(self) -> float | None:
        """Llama 3.1's factor on low rotary frequencies."""
        return self.rope_scaling_factor if self.use_rope_scaling else None

    @property
    def has_yarn(self) -> bool:
        """Are rotary frequencies YaRN's? With latent attention by default."""
        kind = self.rope_type or ("yarn" if self.multi_latent_attention else "rope")
        return self.rotates and "yarn" in (kind, self.position_embedding_type)

    @property
    def yarn(self) -> Yarn | None:
        """YaRN's numbers; None with latent attention where its factor is 1."""
        latent = self.multi_latent_attention
        if not self.has_yarn or (latent and self.rotary_scaling_factor == 1.0):
            return None

        def scale(m: float) -> float:
            return 1.0 + 0.1 * m * math.log(max(1.0, self.rotary_scaling_factor))

        return Yarn(
            self.rotary_scaling_factor,
            self.original_max_position_embeddings,
            self.beta_fast,
            self.beta_slow,
            round(scale(self.mscale) / scale(self.mscale_all_dim), 12),
            self.yarn_correction_range_round_to_int,
            scale(self.mscale_all_dim) ** 2 if latent else 1.0,
        )

    @property
    def longrope(self) -> LongRope | None:
        """LongRoPE's numbers."""
        if self.positions != "rope" or self.rope_type != "longrope":
            return None
        return LongRope(
            self.original_max_position_embeddings,
            self.longrope_short_factor or (),
            self.longrope_long_factor or (),
            self.longrope_attention_factor,
        )

    @property
    def latents(self) -> tuple[int | float | None, ...] | None:
        """Widths of latent attention and the epsilon of its norms; None without."""
        if not self.multi_latent_attention:
            return None
        return (
            self.q_lora_rank,
            self.kv_lora_rank,
            self.qk_head_dim,
            self.qk_pos_emb_head_dim,
            self.v_head_dim,
            self.latent_norm_epsilon or self.norm_epsilon,
        )

    @property
    def window_base(self) -> int | None:
        """The base of layers with a window, where it makes other rotary positions."""
        base = self.window_rotary_base
        if base is None or self.window is None or self.positions != "rope":
            return None
        scaled = self.yarn or self.longrope or self.rope_scaling
        scaled = scaled or self.rotary_seq_len_interpolation_factor or self.rotary_ntk_alpha != 1
        return base if scaled or base != self.rotary_base else None

    @property
    def position_rows(self) -> int | None:
        """Rows of the learned position table."""
        return self.max_position_embeddings if self.positions == "learned_absolute" else None

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        """Of the query/key/value projection, the attention output and the MLP."""
        return self.qkv_bias, self.attention_output_bias, self.mlp_bias

    @property
    def gated(self) -> bool:
        """Does the first MLP matrix hold a gate and an up half?"""
        return self.swiglu or self.geglu or self.quick_geglu

    @property
    def activation(self) -> str:
        """`swiglu`, `geglu`, `quick_geglu`, `squared_relu`, `xielu`, `gelu (tanh)` or `gelu
        (erf)`.

        GELU is the tanh form where Megatron's fused bias + GELU would run (the default with biases)
        and with --openai-gelu; otherwise the exact one.
        """
        for name in ("swiglu", "geglu", "quick_geglu", "squared_relu", "xielu"):
            if getattr(self, name):
                return name
        tanh = self.openai_gelu or (self.bias_gelu_fusion and self.add_bias_linear)
        return "gelu (tanh)" if tanh else "gelu (erf)"

    @property
    def changed_glu(self) -> bool:
        """Has the gated MLP a clamp or an offset?"""
        return self.activation_func_clamp_value is not None or self.glu_linear_offset != 0

    @property
    def ffn(self) -> int:
        """Width of the MLP."""
        if self.ffn_hidden_size:
            return self.ffn_hidden_size
        if self.ffn_multiple_of:
            return -(-int(self.hidden_size * 8 / 3) // self.ffn_multiple_of) * self.ffn_multiple_of
        return int(self.hidden_size * 4 * 2 / 3) // 64 * 64 if self.gated else 4 * self.hidden_size

    @property
    def positions(self) -> str:
        """`learned_absolute`, `rope` or `none`, whichever way it was spelled."""
        if self.use_rotary_position_embeddings or self.position_embedding_type in ("rope", "yarn"):
            return "rope"
        return self.position_embedding_type if self.add_position_embedding else "none"

    @property
    def qkv_bias(self) -> bool:
        """Have queries, keys and values a bias?"""
        return self.add_bias_linear or self.add_qkv_bias

    @property
    def attention_output_bias(self) -> bool:
        """Has the attention output a bias?"""
        return self.add_bias_linear or self.add_attention_output_bias

    @property
    def mlp_bias(self) -> bool:
        """Have the two MLP matrices biases?"""
        return self.add_bias_linear or self.add_mlp_bias

    @property
    def tied(self) -> bool:
        """Does the output layer use the embedding's matrix?"""
        return not self.untie_embeddings_and_output_weights

    @property
    def embeds_again(self) -> bool:
        """Is the word embedding used behind the first pipeline stage, too?"""
        return self.tied or self.mtp_num_layers is not None

    @property
    def mtp_layers(self) -> range:
        """The numbers of multi-token prediction's layers, counted on behind the decoder's, whose
        last one they are like."""
        return range(self.num_layers, self.num_layers + (self.mtp_num_layers or 0))


@dataclass(frozen=True, kw_only=True)
class ModelFlags(MupConfig, MoEConfig, TransformerConfig):
    """All flags of the architecture, and the sizes that follow from them."""

    @property
    def attention_scale(self) -> float:
        """Factor on attention scores."""
        if self.use_mup and not self.softmax_scale:
            base = math.sqrt(self.mup_base_head_dim or 1.0)
            return base / self.head_dim**self.mup_attn_scale_power
        return self.softmax_scale or 1.0 / math.sqrt(self.head_dim)

    @property
    def mup_width(self) -> float:
        """muP's m, the width relative to the base; 1 without muP."""
        return self.hidden_size / (self.mup_base_hidden_size or self.hidden_size)

    @property
    def embedding_factors(self) -> tuple[float, float]:
        """On the word embedding, and (1 without them) on learned positions."""
        learned = self.positions == "learned_absolute"
        both = self.mup_embedding_mult
        return self.embedding_multiplier * both, both if learned else 1.0

    @property
    def word_factor(self) -> float:
        """That on the word embedding."""
        return self.embedding_factors[0]

    @property
    def logits_divisor(self) -> float:
        """What the logits are divided by."""
        if self.mup_output_mult != 1.0:
            return self.logits_scaling / self.mup_output_mult
        return self.logits_scaling * self.mup_width

    def symbols(self, layer: int) -> str:
        """The blocks of the layer of this (global) number, as letters of
        --hybrid-layer-pattern."""
        if self.hybrid_layer_pattern is None:
            like = min(layer, self.num_layers - 1)
            mixer = "G" if super().is_delta_layer(like) else "*"
            return mixer + ("E" if super().is_moe_layer(like) else "-")
        main, *depths = self.pattern_parts
        return main[layer] if layer < len(main) else depths[layer - len(main)]

    def is_moe_layer(self, layer: int) -> bool:
        """Has the layer of this (global) number experts?"""
        return "E" in self.symbols(layer)

    def is_delta_layer(self, layer: int) -> bool:
        """Has the layer of this (global) number a gated delta net in the place of attention?"""
        return "G" in self.symbols(layer)

    @property
    def moe_layers(self) -> list[int]:
        """The layers with experts, multi-token prediction's among them."""
        return list(filter(self.is_moe_layer, range(self.mtp_layers.stop)))

    @property
    def router_numbers(self) -> int:
        """What is summed over all ranks in a step: of each MoE layer the ROUTER_SUMS and the tokens
        of each expert."""
        if self.num_experts is None:
            return 0
        return len(self.moe_layers) * (len(ROUTER_SUMS) + self.num_experts)

    @property
    def expert_ffn(self) -> int:
        """Width of one expert."""
        return self.moe_ffn_hidden_size or self.ffn

    @property
    def expert_width(self) -> int | None:
        """Width of one expert; None without experts."""
        return self.expert_ffn if self.num_experts else None

    @property
    def moe_pattern(self) -> list[bool] | None:
        """Layer by layer, has it experts? None without experts."""
        if not self.num_experts:
            return None
        return [self.is_moe_layer(layer) for layer in range(self.num_layers)]

    @property
    def router_function(self) -> str | None:
        """`router_probabilities`; None without experts."""
        return self.router_probabilities if self.num_experts else None
