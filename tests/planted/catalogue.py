"""The planted bugs: what is changed, and the test that must fail then."""

from tests.planted.bugs import Bug

GRAPHS = "tests/core/training/test_cuda_graph.py::test_replayed_micro_batches_train_alike"
SEQUENCE = "tp4 sp, untied, masked documents"
LAYOUTS = "tests/core/parity/test_layouts.py::test_a_layout_gives_the_numbers_of_one_process"
Z_LOSS = "tests/core/parity/test_z_loss.py::test_a_layout_gives_the_numbers_of_one_process"
MUP = "tests/core/optimizer/test_mup.py::test_steps_are_those_of_a_plain_model_and_adam"
MASKED = "cp2, untied, masked documents"
SCORES = "cp2 tp2 sp, sinks, caps"
RING = "tests/core/parallel/test_ring_attention.py"
ULYSSES = "tests/core/parallel/test_ulysses.py::test_values_and_gradients_of_one_process"
CACHED = "tests/tools/inference/test_cached_model.py::test_logits_are_those_of_the_whole_text"
SHARDS = "dp2, distributed optimizer"
TWICE = "dp4, distributed optimizer in 2 instances, overlap"
SEQUENCE_SHARDS = "tp2 sp dp2, distributed optimizer, overlap, rotary swiglu RMSNorm GQA"
EPOCHS = "tests/core/data/epoch/test_epoch_order.py"
FP8 = "tests/core/kernels/test_fp8.py"
SCALES = "tests/core/parallel/test_fp8.py"
RUNS = "tests/core/training/test_fp8.py"
CRASH = "tests/core/checkpoint/test_crashes.py::test_every_crash_leaves_the_old_or_the_new_one[two ranks]"
LOCAL = "tests/core/training/checkpointing/test_local_copies.py"
STORE = "tests/core/checkpoint/test_store.py"
HISTORY = "tests/core/training/checkpointing/test_one_history.py"
ROWS = "addons/finetuning/tests/test_rows.py"
CHAT = "addons/finetuning/tests/test_chat_training.py"
PACKED_RUNS = "addons/finetuning/tests/test_packed_training.py"
ADAPTERS = "tests/core/kernels/test_libraries.py"
RANKS = "tests/core/parallel/test_transformer_engine.py"
SIXTEEN = "tests/core/optimizer/test_low_precision.py"
SKIPPING = "tests/core/training/skipping/test_skipping.py"
ACTIONS = "tests/features/spikes/test_actions.py"
POLICIES = "tests/features/spikes/test_policy.py"
WINDOWS = "tests/core/model/test_windows.py"
LATENT = "tests/core/model/test_mla.py"
DELTA = "tests/core/model/test_gated_delta.py"
PATTERNS = "tests/core/model/test_pattern.py"
FORMULA = f"{PATTERNS}::test_values_and_gradients_are_those_of_the_formula"
DISTILLED = "addons/distillation/tests/test_distillation.py::test_a_step_by_the_formula"
FIM = "addons/fim/tests/test_fim.py"
LOSS_WEIGHTS = "addons/loss_weights/tests/test_loss_weights.py::test_a_step_by_the_formula"
FROZEN = (
    "tests/core/training/test_frozen.py"
    "::test_frozen_parts_keep_their_bits_and_others_learn_as_if_all_did"
)
DEPTHS = "tests/core/training/test_mtp.py"
DRAFTS = "tests/tools/inference/test_speculative.py"
STAGES = "addons/stages/tests/test_positions.py"
SCRIPTS = "addons/megatron_api/tests/test_scripts.py"
EMA = "addons/averaging/tests/test_ema.py::test_it_is_that_of_the_formula_in_each_layout"
OWN_MODEL = "tests/core/training/test_script_model.py"
REWIND = f"{ACTIONS}::test_rewind_from_memory_is_the_run_started_again[async save, a worker]"
NO_UPDATE = f"{ACTIONS}::test_a_nan_gradient_or_a_spike_changes_nothing"

# Source that several bugs share.
LOAD = "open_samples(run.config, run.plan, samples, numbers)"
EVERY = "*(iteration for iteration in present if keep_every and iteration % keep_every == 0)}"
NORM = "te.LayerNorm(weight.shape[0], eps=eps, device='meta', dtype=weight.dtype, "
SKIP = "self._release_gradients()\nreturn StepResult(False, norm, None)"

BUGS = {
    # Files of other programs.
    "Llama's queries in GGUF not rotated side by side": Bug(
        "addons.convert.gguf_files._value",
        "not heads",
        "True",
        "addons/convert/tests/test_gguf.py::test_round_trip[llama]",
        "peers campaign",
    ),
    # Training in stages.
    "a data set goes on one sample past where it stopped": Bug(
        "addons.stages.staged_source._taken",
        "Shares(saved['weights']).counts(saved['until'] - saved['since'])",
        "Shares(saved['weights']).counts(saved['until'] - saved['since'] + 1)",
        f"{STAGES}::test_no_token_is_repeated_or_lost[epoch]",
    ),
    "a data set goes on where it stopped in samples": Bug(
        "addons.stages.staged_source._taken",
        "count * saved['sequence_length']",
        "count * order['sequence_length']",
        f"{STAGES}::test_no_token_is_repeated_or_lost[megatron]",
    ),
    "a data set starts again when the mix changes": Bug(
        "addons.stages.staged_source._taken",
        "dict(saved['taken'])",
        "{}",
        f"{STAGES}::test_no_token_is_repeated_or_lost[epoch]",
    ),
    "the second epoch of documents as if it were the first": Bug(
        "addons.stages.staged_source.ShuffledDocuments._pieces",
        "divmod(position, self.tokens)",
        "(0, position % self.tokens + position // self.tokens)",
        f"{STAGES}::test_no_token_is_repeated_or_lost[megatron]",
    ),
    "an extreme weight overflows to none": Bug(
        "megatron.data.epoch.proportional_draws.whole_weights",
        "max(1, round(weight / total * RESOLUTION))",
        "round(weight / total * RESOLUTION)",
        f"{STAGES}::test_draws_at_extreme_weights[weights1]",
    ),
    "a draw of a mix counted one past": Bug(
        "megatron.data.epoch.proportional_draws.Shares.counts",
        "(count * left_weight + (total >> 1)) // total",
        "((count + 1) * left_weight + (total >> 1)) // total",
        f"{STAGES}::test_draws_at_extreme_weights[weights3]",
    ),
    # Averaged weights.
    "the average is of bf16 copies": Bug(
        "addons.averaging.average.update",
        "[main.detach() for _, main in run.optimizer.weights]",
        "[param.detach().float() for param, _ in run.optimizer.weights]",
        "addons/averaging/tests/test_ema.py::test_of_bf16_it_averages_the_fp32_main_weights",
    ),
    "the average moves with a skipped update": Bug(
        "addons.averaging.average.WeightAverage.after_step",
        "result.skipped is None",
        "True",
        "addons/averaging/tests/test_ema.py::test_a_skipped_update_leaves_it",
    ),
    "the average's decay counts twice": Bug(
        "addons.averaging.average.update",
        "1.0 - decay",
        "1.0 - decay**2",
        f"{EMA}[one process]",
    ),
    "the average is lost in another layout": Bug(
        "megatron.training.checkpointing.load._read_tensors",
        "run.optimizer.kept_tensors().keys() - stored if with_optimizer else set()",
        "set(run.optimizer.kept_tensors())",
        f"{EMA}[dp2, ZeRO-3]",
    ),
    # A check of nodes.
    "one slow round names a rank": Bug(
        "addons.ops.nodes.verdict.judge",
        "set.intersection",
        "set.union",
        "addons/ops/tests/nodes/test_check_nodes.py::test_slow_in_both_rounds_is_slow",
        "campaign",
    ),
    "a checkpoint's bytes without the main weights": Bug(
        "megatron.config.plan.saves.checkpoint_bytes",
        "precision.fp16 or precision.bf16",
        "precision.fp16",
        "tests/core/config/plan/test_saves.py::test_bytes_are_those_of_a_checkpoint[--bf16-1]",
        "campaign",
    ),
    # Data, loss and optimizer.
    "off by one in the sample index": Bug(
        "megatron.data.index_helpers.build_sample_index",
        "return rows",
        "rows[1:, 1] += 1\nreturn rows",
        "tests/core/data/test_gpt_dataset.py::test_golden_indices",
        "",
    ),
    "forgotten loss mask": Bug(
        "pretrain_gpt.forward_step",
        "((losses * batch.loss_mask).sum(), batch.loss_mask.sum(), metrics)",
        "(losses.sum(), losses.numel(), metrics)",
        "tests/core/training/test_step.py::test_loss_and_norm_are_those_of_the_whole_batch",
        "campaign",
    ),
    "what a script changes on the first tensor-parallel rank stays there": Bug(
        "addons.megatron_api.script_names._of_first_rank",
        "0 if data.get(key) is value else 1 if data.get(key) is None else 2",
        "0",
        f"{SCRIPTS}::test_what_a_script_changes_and_sums_itself[tensor]",
        "campaign",
    ),
    "mpu's data-parallel group without the context-parallel ranks": Bug(
        "addons.megatron_api.ranks.Mpu.__getattr__",
        "if with_context_parallel and name == 'dp':\n    name = 'dp_cp'",
        "pass",
        "addons/megatron_api/tests/test_megatron_core_ranks.py::test_ranks_and_groups",
    ),
    "dropout of a script's own model goes on where it was": Bug(
        "megatron.training.script_step._of_own_model",
        "torch.manual_seed(seeds.seed(-1, 'torch'))",
        "pass",
        f"{OWN_MODEL}::test_a_killed_run_resumes_bit_for_bit_with_its_dropout[one]",
    ),
    "the gradient of a marked parameter is not summed": Bug(
        "megatron.training.script_model._give_records",
        "('tp',) if marked else ()",
        "()",
        f"{OWN_MODEL}::test_a_layer_of_plain_torch_in_our_gpt_trains_as_ours[sequence]",
    ),
    "a script's own loss mask forgotten": Bug(
        "megatron.data.script_datasets.ScriptDataset.__getitem__",
        "mask.view(np.int32)",
        "np.ones_like(mask).view(np.int32)",
        "tests/core/training/test_script_data.py::test_the_same_samples_give_the_same_numbers[one]",
        "campaign",
    ),
    "weight decay on biases": Bug(
        "megatron.optimizer.param_groups.has_weight_decay",
        "not name.endswith('.bias') and len(shape) != 1",
        "True",
        "tests/core/optimizer/test_param_groups.py::test_weight_decay_rule",
    ),
    "gradient not averaged over accumulation": Bug(
        "megatron.training.step.forward_backward",
        "run.optimizer.loss_scale / _nominal_tokens(run, iteration)",
        "run.optimizer.loss_scale / _nominal_tokens(run, iteration)"
        " * run.plan.num_microbatches(iteration)",
        "tests/core/training/test_step.py::test_loss_and_norm_are_those_of_the_whole_batch",
        "campaign",
    ),
    "the same dropout of split heads on every tensor-parallel rank": Bug(
        "megatron.model.blocks.attention.module.SelfAttention.dropout_sites",
        "{'attention': self.tp.rank}",
        "{'attention': 0}",
        "tests/core/parallel/test_layers.py::test_ranks_drop_alike_where_they_hold_the_same",
    ),
    # Muon: what went wrong elsewhere, by its thread in Megatron-LM (MLM) and in a patch of it.
    "MLM#6920: momentum not in the checkpoint": Bug(
        "megatron.optimizer.optimizer.MixedPrecisionOptimizer.tensors",
        "adam.STATE_KEYS[self.kind]",
        "adam.MOMENTS",
        "tests/core/parity/test_muon.py::test_a_killed_run_resumes_as_if_it_had_not_been[one]",
        "campaign",
    ),
    "NorMuon's moments not in the checkpoint": Bug(
        "megatron.optimizer.optimizer.MixedPrecisionOptimizer.tensors",
        "adam.STATE_KEYS[self.kind]",
        "(adam.MOMENTUM, *adam.MOMENTS)",
        "tests/core/parity/test_muon.py"
        "::test_a_killed_run_with_normuon_resumes_as_if_it_had_not_been[tp2 sp]",
    ),
    "NorMuon takes the rows of wide matrices": Bug(
        "megatron.optimizer.muon.neuron_moments",
        "rows >= columns",
        "True",
        "tests/core/optimizer/test_muon.py"
        "::test_an_update_of_singular_values_in_float64[spectral-True-False-True]",
        "campaign",
    ),
    "NorMuon takes the moments of a rank's part for those of the whole matrix": Bug(
        "megatron.optimizer.muon.Muon.directions",
        "all_gather(stacked, axis, kind.dim + 2)",
        "torch.cat([all_gather(stacked[:1], axis, kind.dim + 2),"
        " *[torch.cat([part] * axis.size, kind.dim + 2) for part in stacked[1:].split(1)]])",
        f"{LAYOUTS}[tp2 sp, NorMuon]",
    ),
    "MLM#6380: each rank orthogonalizes its part of a matrix": Bug(
        "megatron.optimizer.muon.Muon.directions",
        "kind.axis is None",
        "True",
        f"{LAYOUTS}[tp2 sp, Muon]",
        "campaign",
    ),
    "MLM#7395: parts of experts taken for whole ones": Bug(
        "megatron.optimizer.muon.Muon.kind",
        "name != 'ep'",
        "name not in ('ep', 'etp')",
        f"{LAYOUTS}[etp2 ep2 dp4, all-to-all, distributed optimizer, Muon, experts]",
    ),
    "ISEEKYAN#130: matrices of more than two dims go to Adam": Bug(
        "megatron.model.blocks.moe.facts.MixtureOfExperts.parameters",
        "Matrices(True)",
        "None",
        "tests/core/optimizer/test_muon.py"
        "::test_the_state_of_a_matrix_is_its_momentum_and_adams_two_of_the_rest",
        "campaign",
    ),
    # Tensor and sequence parallelism.
    "norm gradients of sequence shards not summed": Bug(
        "megatron.parallel.reduction.Reduction.sum_over_ranks",
        "bucket.layout.partial",
        "()",
        f"{LAYOUTS}[{SEQUENCE}]",
    ),
    "sequence parallelism forgets that whole parameters see part of the tokens": Bug(
        "megatron.config.plan.parameter_spec.ParameterSpec.partial_axes",
        "sequence_parallel and not {'tp', 'ep'} & dict(self.splits).keys()",
        "False",
        f"{LAYOUTS}[{SEQUENCE}]",
    ),
    "copies counted twice in the norm": Bug(
        "megatron.parallel.sharding.is_primary_copy",
        "all((getattr(ctx, axis).rank == 0 for axis in copies))",
        "True",
        f"{LAYOUTS}[tp2]",
    ),
    "gradient norm of this rank's part only": Bug(
        "megatron.training.build.build_optimizer",
        "reduce_sum=lambda x: all_reduce(x, ctx.optimizer)",
        "reduce_sum=lambda x: x",
        f"{LAYOUTS}[tp2]",
    ),
    "replicated bias added on every rank": Bug(
        "megatron.parallel.layers.RowParallelLinear.compute",
        "_linear(gemms, x, self.weight, accumulate=self.accumulate)",
        "_linear(gemms, x, self.weight, self.bias, accumulate=self.accumulate)",
        f"{LAYOUTS}[tp2]",
        "sweep",
    ),
    "padding inside the softmax": Bug(
        "megatron.parallel.cross_entropy.parallel_cross_entropy",
        "min(max(vocab_size - vocab_start, 0), logits.shape[1])",
        "logits.shape[1]",
        f"{LAYOUTS}[tp2]",
        "sweep",
    ),
    # Megatron-LM 7452
    "a vocabulary-parallel loss of gathered logits": Bug(
        "megatron.model.gpt.GPTModel.forward",
        "self.losses(self.output_layer(x), labels, token_metrics)",
        "self.losses(gather_alike(self.output_layer(x), self.ctx.tp, dim=-1), labels, "
        "token_metrics)",
        f"{LAYOUTS}[tp2]",
    ),
    "a z-loss of one rank's part of the vocabulary": Bug(
        "megatron.parallel.cross_entropy._ParallelCrossEntropy.backward",
        "with_z_loss(grad_loss, ctx.loss.z_loss, log_total)",
        "with_z_loss(grad_loss, ctx.loss.z_loss, logits[:, :ctx.valid].logsumexp(1))",
        f"{Z_LOSS}[tp2]",
    ),
    "log Z of one rank's part of the vocabulary in the log": Bug(
        "megatron.parallel.cross_entropy._ParallelCrossEntropy.forward",
        "log_z.copy_(log_total)",
        "log_z.copy_(sums.log_sum)",
        f"{Z_LOSS}[tp2]",
    ),
    "z-loss of tokens that do not count": Bug(
        "megatron.training.step._z_loss",
        "(squares * batch.loss_mask).sum(), batch.loss_mask.sum()",
        "squares.sum(), squares.numel()",
        "tests/core/parity/test_z_loss.py::test_a_step_is_that_of_torchs_logsumexp",
    ),
    "loss counted on every tensor-parallel rank": Bug(
        "megatron.training.step._sum_over_ranks",
        "run.runtime.ctx.tp.rank",
        "False",
        f"{LAYOUTS}[tp2]",
    ),
    # Experts.
    "probabilities of experts applied twice": Bug(
        "megatron.kernels.grouped_linear.weighted_swiglu",
        "rows * weights.unsqueeze(-1)",
        "rows * weights.unsqueeze(-1).square()",
        "tests/core/model/test_moe.py::test_a_layer_equals_a_loop_over_tokens",
        "",
    ),
    "the second bias of experts on every expert-tensor-parallel rank": Bug(
        "megatron.model.blocks.moe.module.Experts.forward",
        "probs / self.etp",
        "probs",
        f"{LAYOUTS}[tp2 sp, experts, gpt-oss]",
        "campaign",
    ),
    "the bias of routers forgotten": Bug(
        "megatron.model.blocks.moe.module.Router.forward",
        "None if self.bias is None else self.bias.to(dtype)",
        "None",
        "tests/core/model/test_moe.py::test_biases_of_router_and_experts[False]",
        "campaign",
    ),
    "the gate of gpt-oss clamped on both sides": Bug(
        "megatron.kernels.gated_activations.sigmoid_glu",
        "gate.clamp(max=clamp)",
        "gate.clamp(-clamp, clamp)",
        "tests/core/model/test_moe.py::test_biases_of_router_and_experts[False]",
        "campaign",
    ),
    "dropped tokens computed where the host knows no counts": Bug(
        "megatron.kernels.grouped_linear.Copies.of",
        "places.where(places < count, -1)",
        "places",
        "tests/core/model/test_moe.py::test_a_layer_whose_host_knows_no_counts[0.5]",
        "campaign",
    ),
    # torchtitan 4148
    "evaluation tokens in the expert bias": Bug(
        "megatron.model.blocks.moe.module.Router.forward",
        "return probs, experts",
        "if not training:\n"
        "    load = count(experts, self.config.num_experts)\n"
        "    change = torch.sign(load.mean() - load) * self.config.moe_router_bias_update_rate\n"
        "    self.expert_bias.data += change.to(self.expert_bias)\n"
        "return probs, experts",
        "tests/core/training/test_experts.py::test_evaluation_does_not_change_what_is_trained",
    ),
    # Megatron-LM 6114, Megatron-Bridge 5470
    "padding in the statistics of routers": Bug(
        "megatron.model.blocks.moe.module.Router.add_losses",
        "self.mask(step.loss_mask)",
        "torch.ones_like(self.mask(step.loss_mask))",
        "tests/core/model/test_moe.py::test_only_tokens_that_train_count_in_the_losses_of_routers",
    ),
    # Megatron-LM 7452
    "the balancing loss as often as there are tensor-parallel ranks": Bug(
        "megatron.model.blocks.moe.module.Router.balancing_loss",
        "counts.sum().clamp(min=1)",
        "(counts.sum() / self.axes[-1].size).clamp(min=1)",
        f"{LAYOUTS}[tp2 sp, experts]",
    ),
    "tokens of experts counted on one context-parallel rank": Bug(
        "megatron.model.blocks.moe.module.Router.balancing_loss",
        "all_reduce_(counts, axis)",
        "counts",
        f"{LAYOUTS}[cp2, experts]",
    ),
    "router losses without the factor of the loss": Bug(
        "megatron.model.blocks.moe.module.Router.add_losses",
        "coeff * step.loss_scale",
        "coeff",
        "tests/core/model/test_moe.py::test_losses_of_routers_have_the_factor_of_the_loss",
    ),
    "a bias that changes the probabilities of experts": Bug(
        "megatron.model.blocks.moe.module.select_experts",
        "probs = scores.gather(1, experts)",
        "probs = (scores if bias is None else scores + bias).gather(1, experts)",
        "tests/core/model/test_moe.py::test_a_selection_by_its_formulas",
    ),
    "groups of experts by the sums of as many scores as a token has experts": Bug(
        "megatron.config.moe.MoEConfig.group_score_topk",
        "self.moe_router_group_score_topk or self.moe_router_topk // chosen",
        "self.moe_router_topk // chosen",
        "tests/core/model/test_moe.py::test_a_selection_by_its_formulas",
    ),
    "queries and keys normalized before their rotation": Bug(
        "megatron.model.blocks.attention.module.SelfAttention.forward",
        "not self.norm_after_rope",
        "True",
        "addons/convert/tests/test_corners.py::test_a_corner_is_the_model_of_transformers"
        "[('hunyuan_v1_moe', 0)]",
        "peers campaign",
    ),
    "a constant alpha of the rotary base that is not read": Bug(
        "megatron.config.model_flags.TransformerConfig.rope",
        "self.rotary_base * self.rotary_ntk_alpha ** (width / max(width - 2, 1))",
        "self.rotary_base",
        "tests/core/model/test_gpt.py::test_each_rotary_option_changes_the_output"
        "[rotary_ntk_alpha]",
    ),
    "an FP8 weight with the scale of another block": Bug(
        "addons.convert.block_scales.dequantized",
        "scales.float().repeat_interleave(block[1], 1)",
        "scales.float().repeat(1, block[1])",
        "addons/convert/tests/test_corners.py::test_fp8_weights_are_their_scaled_values",
        "peers campaign",
    ),
    "sinkhorn evaluated as the softmax of the selected experts": Bug(
        "megatron.config.moe.MoEConfig.router_probabilities",
        "self.sinkhorn or self.moe_router_pre_softmax",
        "self.moe_router_pre_softmax",
        "tests/core/config/test_architecture.py::test_another_model_is_a_difference",
    ),
    "every data-parallel rank adds a weight that is written while training": Bug(
        "addons.convert.live.RunTensors.__init__",
        "copies.rank == 0",
        "True",
        "addons/convert/tests/test_hf_saves.py::test_tensors_are_whole_on_every_rank_of_a_layout[zero1]",
    ),
    "shards of a run are not read again": Bug(
        "addons.convert.hf_saves.HFSaves._check",
        "not shards.has(path.name)",
        "False",
        "addons/convert/tests/test_hf_saves.py::test_a_directory_that_the_disk_spoils_is_not_there[bit lost]",
    ),
    "all tensors of a stream are kept": Bug(
        "addons.convert.live.RunTensors.read",
        "self._kept = name, self.whole(name)",
        "self._kept = name, self.whole(name); self._all = [*vars(self).get('_all', ()), self._kept]",
        "addons/convert/tests/test_hf_saves.py::test_a_layer_at_most_is_in_memory[dense]",
    ),
    "entropy without the gradients of the other ranks' columns": Bug(
        "addons.engine.entropy.entropy_of",
        "copy_to(log_z, tp)",
        "log_z",
        "addons/engine/tests/test_engine.py::test_a_loss_of_ones_own_in_a_layout[tp2]",
    ),
    "advantages of the micro-batch that was read last": Bug(
        "addons.engine.batches.Batches.forward_step",
        "self._numbers.setdefault(id(batch.labels), self._next)",
        "(self._numbers.setdefault(id(batch.labels), self._next), self._next)[1]",
        "addons/engine/tests/test_engine.py::test_a_loss_of_ones_own_in_a_layout[pp2 vpp2 tp2]",
    ),
    "an export that nothing verified is written": Bug(
        "addons.convert.verification._known",
        "gaps = unverified(model_type, model)",
        "gaps = []",
        "addons/convert/tests/test_unverified.py::test_another_one_is_refused",
        "campaign",
    ),
    "experts of an upcycled model that differ": Bug(
        "addons.convert.upcycle._copies",
        "of_widths.repeat(count // parts, *[1] * dense.dim())",
        "torch.stack([dense * (1 + expert) for expert in range(count)])",
        "addons/convert/tests/test_upcycle.py::test_an_upcycled_model_computes_what_the_dense_one_does",
    ),
    "all layers of a torch_dist checkpoint are the first": Bug(
        "addons.convert.torch_dist.TorchDistCheckpoint._sort",
        "StoredSlice(tensor, number)",
        "StoredSlice(tensor, 0)",
        "addons/convert/tests/test_torch_dist.py::test_every_spelling_of_the_tensors",
    ),
    "torch_dist chunks are not compared with their checksums": Bug(
        "addons.convert.torch_files._Archive._located",
        "member not in self._checked",
        "False",
        "addons/convert/tests/test_torch_dist.py::test_a_flipped_bit_is_found",
    ),
    "router gradients of one tensor-parallel rank": Bug(
        "megatron.model.blocks.moe.module.MoELayer.route",
        "copy_to(probs, tp)",
        "probs",
        f"{LAYOUTS}[tp2, experts]",
    ),
    "tokens dropped in the order of context-parallel ranks": Bug(
        "megatron.model.blocks.moe.module.Router.gather",
        "scores[rows.argsort()]",
        "scores",
        f"{LAYOUTS}[cp2, experts, capacity by position]",
    ),
    "loads of one data-parallel rank in the global balancing loss": Bug(
        "megatron.model.blocks.moe.module.Router.balancing_loss",
        "(*self.axes, self.data) if so_far else self.axes",
        "self.axes",
        f"{LAYOUTS}[dp2, experts, global balancing loss]",
    ),
    "recomputed micro-batches counted twice in the global balancing loss": Bug(
        "megatron.model.blocks.module.RouterStep.add_earlier",
        "layer not in self._so_far",
        "True",
        "tests/core/model/test_moe.py::test_recomputation_repeats_the_losses_of_routers",
    ),
    # Megatron-LM 5916 and 7165
    "experts left out of the norm": Bug(
        "megatron.parallel.sharding.counts_in_norm",
        "return once and is_primary_copy(sharding, ctx)",
        "left_out = ctx.ep.size > 1 and sharding.replicas == 'experts'\n"
        "return once and is_primary_copy(sharding, ctx) and not left_out",
        f"{LAYOUTS}[ep2, experts, all-to-all]",
    ),
    "replicas counted in the norm of a model with expert parallelism": Bug(
        "megatron.parallel.sharding.counts_in_norm",
        "ctx.replicas(sharding.replicas).instances.rank == 0",
        "True",
        f"{LAYOUTS}[ep2, experts, all-to-all]",
    ),
    # pytorch 160285
    "expert parallelism doubles gradients": Bug(
        "megatron.model.blocks.moe.module.MoELayer.by_all_gather",
        "gather_sequence(x, ep)",
        "all_gather(x, ep)",
        f"{LAYOUTS}[ep2, experts, all-gather]",
    ),
    "gradients of experts summed over all data-parallel ranks": Bug(
        "megatron.parallel.flat_buffers.FlatBuffers.__init__",
        "ctx.experts if bucket.experts else ctx.dense",
        "ctx.dense",
        f"{LAYOUTS}[ep2, experts, all-to-all]",
    ),
    "gradients of experts divided by the data-parallel size": Bug(
        "megatron.parallel.reduction.Reduction._start",
        "self._collect(wait=False)",
        "self._collect(wait=False)\n"
        "self._buffers.flat[bucket.range] *= 1 / self._ctx.ep.size if bucket.layout.experts else 1",
        f"{LAYOUTS}[ep2, experts, all-to-all]",
    ),
    "gradients of experts added to those of the iteration before": Bug(
        "megatron.model.blocks.moe.module.GroupedLinear.is_first",
        "return stale",
        "return False",
        "tests/core/parallel/test_ddp.py::test_a_step_of_experts_has_no_gradients_of_the_step_before",
    ),
    "gradients of keys and values not summed over the ranks that share them": Bug(
        "megatron.model.blocks.attention.module.SelfAttention.own_queries",
        "qkv = gather_sequence(rows, self.tp, -1)",
        "from megatron.parallel.collectives import all_gather\n"
        "parts = list(all_gather(rows.detach(), self.tp, -1).chunk(self.tp.size, -1))\n"
        "parts[self.tp.rank] = rows\n"
        "qkv = torch.cat(parts, -1)",
        f"{LAYOUTS}[tp2, one query group]",
    ),
    "expert-tensor parallelism doubles gradients": Bug(
        "megatron.model.blocks.moe.module.MoELayer.route",
        "gather_sequence(x, etp)",
        "all_gather(x, etp)",
        f"{LAYOUTS}[etp2 dp2, experts, distributed optimizer, overlap]",
    ),
    "experts of all but one tensor-parallel rank omitted from norm and checkpoint": Bug(
        "megatron.parallel.sharding.is_primary_copy",
        "{*sharding.partial} if 'ep' in split else {'tp', *sharding.partial} - split",
        "{'tp', *sharding.partial} - split",
        f"{LAYOUTS}[etp1 ep2 tp2 sp, all-to-all, distributed optimizer, Muon, experts]",
    ),
    "copies of tokens mixed up between experts": Bug(
        "megatron.model.blocks.moe.module.MoELayer.by_all_to_all",
        "inner.argsort(stable=True)",
        "torch.arange(len(rows))",
        f"{LAYOUTS}[ep2, experts, all-to-all]",
    ),
    "token counts of experts doubled by recomputation": Bug(
        "megatron.model.blocks.moe.module.Router.add_losses",
        "torch.cat((sums, count(experts, m.experts, mask)))",
        "torch.cat((sums, count(experts, m.experts, mask))) + step.sums.get(self.number, 0)",
        "tests/core/model/test_moe.py::test_recomputation_repeats_the_losses_of_routers",
        "campaign",
    ),
    "input gradient not summed": Bug(
        "megatron.parallel.layers._tp_comm",
        "start_all_reduce(grad, tp)",
        "lambda: grad",
        f"{LAYOUTS}[tp2]",
    ),
    "position embedding not cut with the sequence": Bug(
        "megatron.model.embedding.Embedding.forward",
        "my_slice(positions, self.ctx.tp)",
        "positions[:x.shape[0]]",
        f"{LAYOUTS}[{SEQUENCE}]",
    ),
    "overflow not shared between ranks": Bug(
        "megatron.training.build.build_optimizer",
        "reduce_max=lambda x: all_reduce(x, ctx.optimizer, 'max')",
        "reduce_max=lambda x: all_reduce(x, ctx.optimizer, 'min')",
        "tests/core/parity/test_layouts.py::test_an_overflow_on_one_rank_skips_the_step_on_all",
    ),
    # Pipeline parallelism.
    "a tied embedding not summed": Bug(
        "megatron.config.plan.parameters.parameter_table",
        "('ends',) if model.embeds_again else ()",
        "()",
        f"{LAYOUTS}[pp2]",
    ),
    "a tied embedding counted twice in the norm": Bug(
        "megatron.parallel.sharding.is_primary_copy",
        "all(getattr(ctx, axis).rank == 0 for axis in copies)",
        "all(getattr(ctx, axis).rank == 0 for axis in copies - {'ends'})",
        f"{LAYOUTS}[pp2]",
    ),
    "too few warm-up forwards": Bug(
        "megatron.config.plan.schedules.warm_up_forwards",
        "(chunks - 1) * (group or stages)",
        "chunks - 1",
        f"{LAYOUTS}[pp2 vpp2, layout E|tt|t|tL]",
    ),
    "a warm-up that leaves stages idle": Bug(
        "megatron.config.plan.schedules.warm_up_forwards",
        "2 * after",
        "after",
        "tests/core/config/plan/test_schedules.py",
    ),
    "a swapped virtual chunk": Bug(
        "megatron.training.step.MicroBatches.forward",
        "self.forward_step(inputs, run.model[chunk])",
        "self.forward_step(\n"
        "    inputs, run.model[-1 - chunk if run.runtime.ctx.pp.rank == 1 else chunk]\n)",
        f"{LAYOUTS}[pp4 vpp2]",
        "sweep",
    ),
    "backward begins with the first virtual chunk": Bug(
        "megatron.config.plan.schedules.compute_order",
        "chunks - 1 - chunk",
        "chunk",
        f"{LAYOUTS}[pp2 vpp2, layout E|tt|t|tL]",
    ),
    "the same dropout in every micro-batch of a pipeline": Bug(
        "megatron.training.step.MicroBatches._seeds",
        "DropoutSeeds(seed, self.iteration, micro_batch, self.dp_cp_rank)",
        "DropoutSeeds(\n    seed, self.iteration, micro_batch * (len(self.run.model) == 1), "
        "self.dp_cp_rank\n)",
        f"{LAYOUTS}[pp2 vpp2, dropout]",
    ),
    "a CUDA graph that reads the samples of its first micro-batch": Bug(
        "megatron.training.cuda_graph.MicroBatchGraphs.run",
        "self._copy(samples.rows, static.rows)",
        "",
        f"{GRAPHS}[llama]",
    ),
    "a CUDA graph that repeats its dropout masks": Bug(
        "megatron.training.cuda_graph.MicroBatchGraphs.run",
        "self._copy(self._seeds.on_host(seeds), self._seeds.values)",
        "",
        f"{GRAPHS}[gpt]",
    ),
    "a CUDA graph that keeps the factor of its first loss": Bug(
        "megatron.training.cuda_graph.MicroBatchGraphs.run",
        "self._factor.fill_(factor)",
        "self._factor.fill_(self._factor or factor)",
        f"{GRAPHS}[batch sizes that change]",
    ),
    "a CUDA graph with the factor of its first loss as a number": Bug(
        "megatron.training.step.MicroBatches.region",
        "factor.to(output[0].dtype)",
        "self.backward_scale",
        f"{GRAPHS}[loss scales that change]",
    ),
    "a CUDA graph that replaces the gradients of experts": Bug(
        "megatron.training.cuda_graph.MicroBatchGraphs.__init__",
        "p.overwrites = False",
        "pass",
        f"{GRAPHS}[experts]",
    ),
    "a gradient sent to the previous stage without its residual branch": Bug(
        "megatron.parallel.pipeline.StageRunner.backward",
        "self.input_gradients[key] = hidden.grad",
        "self.input_gradients[key] = hidden.grad - (0 if gradient is None else gradient)",
        f"{LAYOUTS}[pp4]",
    ),
    "a loss scale applied on every stage": Bug(
        "megatron.training.step.MicroBatches.backward",
        "torch.autograd.backward(output, gradient)",
        "torch.autograd.backward(output, gradient * self.backward_scale)",
        f"{LAYOUTS}[pp2]",
    ),
    "a rank that outvotes the other by repeating itself": Bug(
        "addons.ops.step_verification.hook._majority",
        "len(by) > 1",
        "len(by) > 0",
        "addons/ops/tests/step_verification/test_step_verification.py"
        "::test_a_rank_that_repeats_its_error_is_not_outvoted_by_itself",
    ),
    "buckets summed before the gradients are compared": Bug(
        "megatron.parallel.reduction.Reduction._gradient_ready",
        "self.instead",
        "None",
        "addons/ops/tests/step_verification/test_step_verification.py::test_a_verified_run_is_the_same_run",
    ),
    "sums of a step reduced over data-parallel ranks only": Bug(
        "megatron.training.step._sum_over_ranks",
        "run.runtime.ctx.world",
        "run.runtime.ctx.dp_cp",
        "tests/core/training/test_step.py::test_ranks_of_a_model_agree",
    ),
    # Context parallelism.
    "loss counted as often as there are context-parallel ranks": Bug(
        "pretrain_gpt.forward_step",
        "(losses * batch.loss_mask).sum()",
        "(losses * batch.loss_mask).sum() * model.ctx.cp.size",
        f"{LAYOUTS}[{MASKED}]",
    ),
    "tokens counted as if each rank had all of them": Bug(
        "pretrain_gpt.forward_step",
        "batch.loss_mask.sum()",
        "batch.loss_mask.sum() * model.ctx.cp.size",
        f"{LAYOUTS}[{MASKED}]",
    ),
    "parts of a softmax joined by the larger sum": Bug(
        "megatron.parallel.attention_blocks.join_",
        "torch.logaddexp(lse, block_lse, out=lse)",
        "torch.maximum(lse, block_lse, out=lse)",
        f"{LAYOUTS}[{MASKED}]",
    ),
    "parts of a softmax joined with equal weights": Bug(
        "megatron.parallel.attention_blocks.join_",
        "block_lse - lse",
        "lse - lse",
        f"{LAYOUTS}[{MASKED}]",
    ),
    "chunks of a rank in another order than its masks": Bug(
        "megatron.parallel.zigzag.chunks_of",
        "2 * ranks - 1 - rank",
        "ranks + rank",
        f"{LAYOUTS}[{MASKED}]",
        "campaign",
    ),
    "positions that are not those of the tokens": Bug(
        "megatron.training.batch.make_batch",
        "own(position_ids)",
        "own(position_ids.roll(rules.cp.rank, 1))",
        f"{LAYOUTS}[{MASKED}]",
    ),
    "gradients of keys and values not added to their owner's": Bug(
        "megatron.parallel.ring_attention._Grads.bring_home",
        "_add_rows(self.totals[0], self.arriving(), self.runs)",
        "self.arriving()",
        f"{LAYOUTS}[{MASKED}]",
    ),
    "a window one token short": Bug(
        "megatron.config.model_flags.TransformerConfig.window_of",
        "self.window_size[0] + 1",
        "self.window_size[0]",
        f"{WINDOWS}::test_a_token_sees_itself_and_so_many_before_it[1]",
    ),
    "output gates of other heads": Bug(
        "megatron.model.blocks.attention.module.SelfAttention.project",
        "gates.sigmoid().flatten(2, 3)",
        "gates.sigmoid().flip(3).flatten(2, 3)",
        f"{FORMULA}[**]",
    ),
    "output gates of other ranks that share a query group": Bug(
        "megatron.model.blocks.attention.module.SelfAttention.own_queries",
        "heads[..., number, :, :]",
        "torch.cat((heads[..., :1, number, :, :], heads[..., 1:, 0, :, :]), -3)",
        f"{LAYOUTS}[tp4 sp, two query groups, output gates]",
        "campaign",
    ),
    "QK-clip of output gates": Bug(
        "megatron.model.blocks.attention.facts.Attention.clipped",
        "[0.0] * self.model.attention_output_gate",
        "[alpha] * self.model.attention_output_gate",
        "addons/ops/tests/attention_logits/test_attention_logits.py"
        "::test_powers_of_the_rows_of_a_query_group",
    ),
    "layers of a pattern numbered by stage": Bug(
        "megatron.model.layer.Decoder.__init__",
        "LAYERS[config.layer(i).residual](config, params.scope(f'layers.{i}'), ctx, i, kernels, "
        "recompute)",
        "LAYERS[config.layer(i).residual](config, params.scope(f'layers.{i}'), ctx, "
        "i - layers.start, kernels, recompute)",
        f"{LAYOUTS}[pp2 vpp2, a pattern of blocks, output gates]",
    ),
    "a pattern's blocks counted as layers of two": Bug(
        "megatron.config.model_flags.TransformerConfig.residual_branches",
        "2 if self.hybrid_layer_pattern is None else 1",
        "2",
        f"{PATTERNS}::test_a_pattern_of_pairs_is_a_gpt",
    ),
    "transformers#48205: routers without gradient": Bug(
        "megatron.model.blocks.moe.module.select_experts",
        "probs * config.router_scale",
        "probs.detach() * config.router_scale",
        f"{FORMULA}[EE]",
    ),
    "a window in every layer": Bug(
        "megatron.config.model_flags.TransformerConfig.window_of",
        "self.window_size is None or self._is_full(layer)",
        "self.window_size is None",
        f"{WINDOWS}::test_which_layers_have_the_window[3-windows1]",
    ),
    "a window switched off by the local length": Bug(
        "megatron.model.blocks.attention.module.SelfAttention.spec",
        "self.facts.window_in(queries.shape[0] * self.ring.size)",
        "self.facts.window_in(len(queries))",
        f"{LAYOUTS}[cp4, windows, masked documents]",
        "campaign",
    ),
    "a window switched off by the length before heads are exchanged": Bug(
        "megatron.model.blocks.attention.module.SelfAttention.spec",
        "self.facts.window_in(queries.shape[0] * self.ring.size)",
        "self.facts.window_in(len(queries) // self.cp.size)",
        f"{LAYOUTS}[cp4 a2a+p2p, windows, masked documents]",
        "campaign",
    ),
    # prime-rl 2828
    "full attention to exchanged heads where a window is asked for": Bug(
        "megatron.model.blocks.attention.module.SelfAttention.spec",
        'self.asked | {"window": window}',
        'self.asked | {"window": window if self.exchanging.size == 1 else None}',
        f"{LAYOUTS}[cp2 tp2 sp a2a, windows]",
        "campaign",
    ),
    # accelerate 4177: the loss is right
    "gradients of exchanged heads not sent back": Bug(
        "megatron.parallel.exchange._AllToAll.backward",
        "_exchange_rows(grad, *ctx.way)",
        "grad",
        f"{ULYSSES}[2]",
        "campaign",
    ),
    "late chunks of exchanged heads in the order of the ranks": Bug(
        "megatron.parallel.ulysses.by_heads",
        "t[:, 1].flip(0)",
        "t[:, 1]",
        f"{LAYOUTS}[cp2 a2a, untied, masked documents]",
        "campaign",
    ),
    "shared keys in the order of other ranks": Bug(
        "megatron.parallel.ulysses.by_heads",
        "t.repeat_interleave(ranks // k.shape[2], 2)",
        "t.repeat(1, 1, ranks // k.shape[2], 1)",
        f"{ULYSSES}[4]",
        "campaign",
    ),
    "sinks of the first rank's heads on all that exchange them": Bug(
        "megatron.model.blocks.attention.module.SelfAttention.sinks",
        "my_slice(self.core_attention.softmax_offset, self.exchanging)",
        "self.core_attention.softmax_offset.chunk(self.exchanging.size)[0]",
        f"{LAYOUTS}[cp2 a2a, sinks, caps, selective recompute]",
        "campaign",
    ),
    "largest scores of exchanged heads under other heads": Bug(
        "megatron.model.blocks.attention.module.SelfAttention.record",
        "self.maxima.chunk(self.exchanging.size)[self.exchanging.rank]",
        "self.maxima.chunk(self.exchanging.size)[0]",
        "addons/ops/tests/attention_logits/test_attention_logits.py::test_every_layout_clips_alike"
        "[grouped queries, Adam-cp2 a2a]",
        "campaign",
    ),
    "a window that begins with each block of the ring": Bug(
        "megatron.parallel.zigzag.tiles_in_window",
        "distance=back - first",
        "distance=0",
        f"{LAYOUTS}[cp2 tp2 sp, windows]",
    ),
    "a window's first key on another rank left out": Bug(
        "megatron.config.plan.window_rows.first_seen",
        "(queries - keys) * chunk - window + 1",
        "(queries - keys) * chunk - window + 2",
        "tests/core/parallel/test_ring_attention.py::test_windows[2]",
    ),
    "a window's rows of another rank without the last": Bug(
        "megatron.config.plan.window_rows.rows_seen",
        "(half + 1) * chunk",
        "(half + 1) * chunk - 1",
        "tests/core/parallel/test_zigzag.py::test_a_rank_gets_the_rows_that_its_windows_have",
    ),
    "padding in the cache of a window": Bug(
        "megatron.model.blocks.cache.WindowCache.remember",
        "(offsets < ends) & (offsets >= ends - self.window)",
        "offsets >= ends - self.window",
        "tests/tools/inference/test_cached_model.py::test_logits_are_those_of_the_whole_text[windows in two of three layers]",
    ),
    "MLM#1429: scores of latent attention sharpened by --mscale": Bug(
        "megatron.config.model_flags.TransformerConfig.yarn",
        "scale(self.mscale_all_dim) ** 2 if latent else 1.0",
        "scale(self.mscale) ** 2 if latent else 1.0",
        f"{LATENT}::test_by_the_formula[YaRN]",
    ),
    "TE#715 of ROCm: weights to latents in the norm on every tensor-parallel rank": Bug(
        "megatron.parallel.sharding.counts_in_norm",
        "return once and is_primary_copy(sharding, ctx)",
        "return once and ('down_proj' in sharding.name or is_primary_copy(sharding, ctx))",
        f"{LAYOUTS}[tp2 sp, latent attention]",
    ),
    "MLM#7395: weights to latents not known as replicas": Bug(
        "megatron.config.plan.parameter_spec.ParameterSpec.partial_axes",
        "whole = sequence_parallel and not {'tp', 'ep'} & dict(self.splits).keys()",
        "split = {'tp', 'ep'} & dict(self.splits).keys() or 'down_proj' in self.name\n"
        "whole = sequence_parallel and not split",
        f"{LAYOUTS}[tp2 sp, latent attention]",
    ),
    "gradients of the rotary key of other ranks' heads left out": Bug(
        "megatron.model.blocks.mla.module.MultiLatentAttention.latents",
        "gather_sequence(key, self.tp) if self.sequence_parallel else copy_to(key, self.tp)",
        "gather_sequence(key, self.tp) if self.sequence_parallel else key",
        f"{LAYOUTS}[tp2, latent attention]",
        "campaign",
    ),
    "values in the ring as wide as keys": Bug(
        "megatron.parallel.ring_attention._parts",
        "width = k.shape[-1]",
        "width = both.shape[-1] // 2",
        "tests/core/parallel/test_ring_attention.py::test_values_of_another_width_than_keys"
        "[p2p-None-True]",
    ),
    "latents without their norm in the cache": Bug(
        "megatron.model.blocks.mla.module.MultiLatentAttention.absorbed",
        "keys, values = kept.unsqueeze(1), kept[..., : facts.latent].unsqueeze(1)",
        "keys, values = kept.unsqueeze(1), kept[..., facts.rotary :].unsqueeze(1)",
        f"{LATENT}::test_generation_from_latents[absorbed-YaRN]",
    ),
    "a state that goes on into the next document": Bug(
        "megatron.kernels.delta_rule._in_chunks",
        "entering = entering.masked_fill(ids != before, -torch.inf)",
        "",
        f"{DELTA}::test_chunks_are_the_recurrence[documents over chunks]",
        "",
    ),
    "writes before the border of a document in the state behind it": Bug(
        "megatron.kernels.delta_rule._in_chunks",
        "leaving = leaving.masked_fill(ids != ids[..., -1:], -torch.inf)",
        "",
        f"{DELTA}::test_chunks_are_the_recurrence[documents over chunks]",
    ),
    "a convolution that sees the document before": Bug(
        "megatron.kernels.delta_rule.causal_conv",
        "ids != document_ids",
        "ids < 0",
        f"{DELTA}::test_documents_do_not_see_each_other",
    ),
    "a state that is shrunk behind a write": Bug(
        "megatron.kernels.delta_rule._in_chunks",
        "g.unsqueeze(-1) - g.unsqueeze(-2)",
        "g.unsqueeze(-1) - F.pad(g, (1, -1)).unsqueeze(-2)",
        f"{DELTA}::test_chunks_are_the_recurrence[odd]",
    ),
    "a state that a repeated call finds overwritten": Bug(
        "megatron.model.blocks.gated_delta.module.StateCache.read",
        "1 - slot",
        "slot",
        f"{DELTA}::test_generation_from_a_state",
    ),
    "padding of a shorter prompt in the state": Bug(
        "megatron.model.blocks.gated_delta.module.StateCache.counts",
        "min(lengths) == positions.shape[1]",
        "True",
        f"{DELTA}::test_generation_from_a_state",
    ),
    "the norm of a rank's value heads without the gradients of the others": Bug(
        "megatron.model.blocks.gated_delta.facts.GatedDeltaNet.parameters",
        "partial=('tp',)",
        "partial=()",
        f"{LAYOUTS}[tp4, gated delta nets]",
        "campaign",
    ),
    "accelerate#4177: linear attention to the tokens of one context-parallel rank": Bug(
        "megatron.model.blocks.gated_delta.facts.GatedDeltaNet.refuses",
        "f['context_parallel_size'] > 1",
        "False",
        f"{DELTA}::test_the_flags[--context-parallel-size 2-flags-exclude-each-other]",
    ),
    "MLM#7452: a depth's mean over the tokens of one rank": Bug(
        "megatron.training.depths.with_scales",
        "all_reduce(counts.to(run.runtime.device), run.runtime.ctx.dp)",
        "counts",
        f"{DEPTHS}::test_ranks_count_the_tokens_of_all[dp2]",
    ),
    "a depth's mean over the tokens of the loss": Bug(
        "megatron.training.depths.with_scales",
        "weight * total[0] / total[1:].clamp(min=1)",
        "weight * total[1:] / total[1:].clamp(min=1)",
        f"{DEPTHS}::test_a_step_by_the_formula[documents-1]",
    ),
    "MLM#7498: gradients of the depths times cp_size": Bug(
        "megatron.model.gpt.GPTModel._told",
        "self.losses(self.output_layer(x), labels, metrics)",
        "self.losses(self.output_layer(x), labels, metrics) * self.ctx.cp.size",
        f"{DEPTHS}::test_ranks_count_the_tokens_of_all[cp2]",
    ),
    "MLM#3959: labels rolled in a rank's chunks": Bug(
        "megatron.training.batch.make_batch",
        "[Depth(*map(own, depth)) for depth in whole]",
        "rolled(own(tokens), own(labels), None if loss_mask is None else own(loss_mask), "
        "None if document_ids is None else own(document_ids), len(depth_scales))",
        f"{DEPTHS}::test_ranks_count_the_tokens_of_all[cp2]",
    ),
    "AReaL#1659: hidden states detached at every depth": Bug(
        "megatron.model.blocks.mtp.module.MultiTokenPrediction.forward",
        "layer(states[-1], embed, inputs)",
        "layer(states[-1].detach(), embed, inputs)",
        f"{DEPTHS}::test_a_step_by_the_formula[whole rows-1]",
        "campaign",
    ),
    "in a pipeline the loss of several depths is their sum": Bug(
        "megatron.training.depths.with_scales",
        "backward_scale * model.mtp_loss_scaling_factor / depths",
        "backward_scale * model.mtp_loss_scaling_factor "
        "/ (depths if run.runtime.ctx.pp.size == 1 else 1)",
        f"{DEPTHS}::test_ranks_count_the_tokens_of_all[pp2]",
    ),
    "labels rolled over the end of a document": Bug(
        "megatron.model.blocks.mtp.module.rolled",
        "document_ids[:, k:] == document_ids[:, :-k]",
        "document_ids[:, k:] >= document_ids[:, :-k]",
        f"{DEPTHS}::test_a_step_by_the_formula[documents-1]",
    ),
    "the loss mask is not rolled": Bug(
        "megatron.model.blocks.mtp.module.rolled",
        "inside * loss_mask.roll(-k, 1)",
        "inside * loss_mask",
        f"{DEPTHS}::test_a_step_by_the_formula[no loss behind a document-1]",
    ),
    "the hidden state before the embedding in eh_proj": Bug(
        "megatron.model.blocks.mtp.module.MTPLayer.forward",
        "(self.enorm(embed()), self.hnorm(x))",
        "(self.hnorm(x), self.enorm(embed()))",
        f"{DEPTHS}::test_a_step_by_the_formula[whole rows-1]",
    ),
    "gradients of the embedding's copy for later tokens are not summed": Bug(
        "megatron.config.plan.parameters.parameter_table",
        "partial=('ends',) if model.embeds_again else ()",
        "partial=('ends',) if model.tied else ()",
        f"{DEPTHS}::test_ranks_count_the_tokens_of_all[pp2]",
    ),
    "padding rows are old tokens": Bug(
        "addons.convert.vocabulary._extended",
        "native.reader.read(name)[: added.first]",
        "native.reader.read(name)",
        "addons/convert/tests/test_vocabulary.py::test_new_rows_are_the_mean_of_what_spells_them",
        "peers campaign",
    ),
    "moments of new tokens begin as weights do": Bug(
        "addons.convert.longer_reader.LongerReader._rows",
        "name.split('.', 2)[1] in _STATE",
        "not name.split('.', 2)[1]",
        "addons/convert/tests/test_extend_at_load.py::test_old_rows_keep_their_bits[ZeRO-1-tied]",
        "peers campaign",
    ),
    "new rows of a rank begin at its first": Bug(
        "addons.convert.longer_reader.LongerReader.read_later",
        "after = start + old - self._added.first",
        "after = 0",
        "addons/convert/tests/test_extend_at_load.py::test_old_rows_keep_their_bits[tp2-tied]",
        "peers campaign",
    ),
    "the teacher is trained with dropout": Bug(
        "addons.distillation.hook.Distillation._outputs",
        "LayerInputs(None, batch.document_ids)",
        "LayerInputs(None, batch.document_ids, batch.dropout_seeds)",
        f"{DISTILLED}[tp1]",
    ),
    "the divergence is the reverse one": Bug(
        "addons.distillation.loss._Divergence.forward",
        "(of_teacher - logs[1, rows, None]).exp_()",
        "(of_student - logs[0, rows, None]).exp_()",
        f"{DISTILLED}[tp1]",
    ),
    "the divergence's gradient has the temperature twice": Bug(
        "addons.distillation.loss._Divergence.forward",
        "1.0 / (temperature * STORED)",
        "1.0 / (temperature * temperature * STORED)",
        f"{DISTILLED}[tp1]",
    ),
    "tokens that do not count are distilled": Bug(
        "addons.distillation.hook._sum",
        "losses.sum() if mask is None else (losses * mask).sum()",
        "losses.sum()",
        f"{DISTILLED}[tp1]",
    ),
    "a rank's columns are the vocabulary of the divergence": Bug(
        "addons.distillation.loss._Divergence.forward",
        "all_reduce(torch.cat((shares, (shares[1] * gap).unsqueeze(0))), tp)",
        "torch.cat((shares, (shares[1] * gap).unsqueeze(0)))",
        f"{DISTILLED}[tp2]",
    ),
    "hidden states of a rank's tokens have the mask of the first": Bug(
        "addons.distillation.hook.Distillation._hidden_loss",
        "my_slice(mask, ctx.tp, 1)",
        "mask.chunk(ctx.tp.size, 1)[0]",
        f"{DISTILLED}[tp2 sp]",
    ),
    "losses are scaled on each context-parallel rank": Bug(
        "addons.distillation.hook.Distillation._as_large",
        "all_reduce(values, self._teacher.ctx.cp)",
        "values",
        f"{DISTILLED}[cp2]",
    ),
    "fill in the middle draws on from sample to sample": Bug(
        "addons.fim.source.FimDataset.__getitem__",
        "np.random.RandomState(halves)",
        "self.__dict__.setdefault('random', np.random.RandomState(halves))",
        f"{FIM}::test_a_sample_is_a_function_of_seed_split_and_number[epoch]",
    ),
    "every split has the draws of training": Bug(
        "addons.fim.source.FimDataset.__getitem__",
        "SPLITS.index(self.index_split)",
        "0",
        f"{FIM}::test_a_sample_is_a_function_of_seed_split_and_number[epoch]",
    ),
    "a part behind the last end of a document is left as it is": Bug(
        "addons.fim.middle._parts",
        "yield change(tokens[first:])",
        "yield tokens[first:]",
        f"{FIM}::test_the_same_draws_give_megatrons_tokens[seed 1094767428]",
    ),
    "ranges of documents end one document early": Bug(
        "addons.weighted_splits.source._in_megatron_order",
        "split_range(part.bounds, len(corpus))",
        "split_range(part.bounds, len(corpus) - 1)",
        "addons/weighted_splits/tests/test_weighted_splits.py::"
        "test_each_group_reads_its_documents_by_its_weights[megatron]",
    ),
    "loss weights normalized on each rank": Bug(
        "addons.loss_weights.hook.weigh_by_source",
        "mask * table[batch.subset_ids]",
        "mask * table[batch.subset_ids] / (mask * table[batch.subset_ids]).mean().clamp(min=1e-9)",
        f"{LOSS_WEIGHTS}[dp2]",
    ),
    "tokens of a source counted with its weight": Bug(
        "megatron.training.step.MicroBatches._add_loss",
        "batch if batch.counted is None else replace(batch, loss_mask=batch.counted)",
        "batch",
        f"{LOSS_WEIGHTS}[one rank]",
    ),
    "weight decay on frozen parameters": Bug(
        "megatron.parallel.flat_buffers.FlatBuffers.__init__",
        "[p for p in given if p.requires_grad]",
        "given",
        f"{FROZEN}[one rank]",
    ),
    "a pipeline stage with nothing to train waits for a graph": Bug(
        "megatron.parallel.pipeline.StageRunner.backward",
        "key not in self.alive",
        "False",
        f"{FROZEN}[pp2, nothing to train on stage 0]",
    ),
    "what is made of frozen latents has no graph": Bug(
        "megatron.parallel.recompute.recompute_inputs",
        "not any(arg.requires_grad for arg in args)",
        "False",
        f"{FROZEN}[frozen latents, made again]",
    ),
    "a stage of its own for later tokens does not sum the embedding's gradient": Bug(
        "megatron.config.plan.plan.embedding_stages",
        "last - is_apart(config)",
        "last",
        f"{LAYOUTS}[pp3, multi-token prediction, layout Ett|mm|L]",
        "campaign",
    ),
    "QK-clip leaves the layers of later tokens": Bug(
        "addons.ops.attention_logits.logits.AttentionLogits.__init__",
        "chunk.layers()",
        "chunk.decoder.layers.values()",
        "addons/ops/tests/attention_logits/test_attention_logits.py"
        "::test_layers_of_multi_token_prediction_are_clipped_too",
    ),
    "depths of the log accept a token whatever those before it are": Bug(
        "megatron.model.blocks.mtp.module.Depths.add_losses",
        "correct if right is None else right & correct",
        "correct",
        f"{DEPTHS}::test_a_step_by_the_formula[whole rows-1]",
    ),
    "a script is told that every stage has the heads": Bug(
        "addons.megatron_api.script_names.get_mtp_ranks",
        "[pp_ranks[-1 - apart]] if args.mtp_num_layers else []",
        "[*pp_ranks] if args.mtp_num_layers else []",
        f"{SCRIPTS}::test_a_script_of_megatron_trains_heads_for_later_tokens[pipeline]",
        "campaign",
    ),
    "a draft that was not accepted stays in the caches of the heads": Bug(
        "megatron.inference.speculative.SpeculativeModel.draft",
        "min(end, len(tokens) - count)",
        "min(end, len(tokens) - 1)",
        f"{DRAFTS}::test_drafts_are_those_of_the_heads_without_a_cache[rotary]",
        "campaign",
    ),
    "hidden states of drafts that were not accepted are kept": Bug(
        "megatron.inference.speculative.SpeculativeModel._hidden",
        "self._states[row][:max(0, start - self._first[row])]",
        "self._states[row][:max(0, start - self._first[row]) and None]",
        f"{DRAFTS}::test_drafts_are_those_of_the_heads_without_a_cache[rotary]",
        "campaign",
    ),
    "a token that was not accepted stays in the cache": Bug(
        "megatron.inference.engine.Engine._choose",
        "len(generation.tokens) - 1",
        "min(generation.cached + len(chosen[row]), len(generation.tokens) - 1 + (agreed < compared))",
        f"{DRAFTS}::test_text_is_the_same_whatever_is_drafted",
        "campaign",
    ),
    "one draft too many is accepted": Bug(
        "megatron.inference.engine.Engine._choose",
        "new[-1][-1] or token != draft",
        "new[-1][-1] or (agreed and token != draft)",
        f"{DRAFTS}::test_text_is_the_same_whatever_is_drafted",
        "campaign",
    ),
    "acceptance counts the draft that did not agree": Bug(
        "megatron.inference.engine.Engine._choose",
        "depth < agreed",
        "depth <= agreed",
        f"{DRAFTS}::test_drafts_that_are_wrong_are_counted",
        "campaign",
    ),
    "the cache of one layer reported as that of all": Bug(
        "megatron.inference.cached_model.CachedModel.cache_bytes",
        "sum(cache.nbytes for cache in self._caches)",
        "self._caches[0].nbytes",
        f"{LATENT}::test_bytes_of_the_cache",
    ),
    "Megatron's latent attention without its YaRN": Bug(
        "addons.convert.megatron_names.flags_from",
        "flags.get('multi_latent_attention')",
        "None",
        "addons/convert/tests/test_arguments.py"
        "::test_yarn_of_latent_attention_has_what_its_arguments_say_or_is_refused",
    ),
    "QK-clip by the scores of one rank's tokens": Bug(
        "addons.ops.attention_logits.logits.AttentionLogits.close",
        "all_reduce_(self._largest.clone(), self._ctx.world, 'max')",
        "all_reduce_(self._largest.clone(), self._ctx.model, 'max')",
        "addons/ops/tests/attention_logits/test_attention_logits.py::test_every_layout_clips_alike"
        "[latent attention, Muon-dp2, distributed optimizer, overlap]",
    ),
    "QK-clip of rotary channels by the root of the factor": Bug(
        "megatron.model.blocks.mla.facts.LatentAttention.clipped",
        "(self.rotary, 1.0)",
        "(self.rotary, alpha)",
        "addons/ops/tests/attention_logits/test_attention_logits.py::test_scores_of_clipped_heads_are_the_threshold"
        "[latents of queries-0.5]",
    ),
    # Megatron-LM 7530
    "sinks of all but one tensor-parallel rank left out of the norm": Bug(
        "megatron.parallel.sharding.counts_in_norm",
        "return once and is_primary_copy(sharding, ctx)",
        "left_out = ctx.tp.rank > 0 and 'softmax_offset' in sharding.name\n"
        "return once and is_primary_copy(sharding, ctx) and not left_out",
        f"{LAYOUTS}[{SCORES}]",
    ),
    # TransformerEngine 3551
    "sinks dropped by the ring": Bug(
        "megatron.parallel.ring_attention._RingAttention.forward",
        "sinks is not None",
        "False",
        f"{RING}::test_sinks_count_once_and_scores_are_capped[2]",
    ),
    "sinks that count twice in the ring": Bug(
        "megatron.parallel.ring_attention._RingAttention.forward",
        "with_sinks(out, lse, sinks)",
        "with_sinks(*with_sinks(out, lse, sinks), sinks)",
        f"{LAYOUTS}[{SCORES}]",
    ),
    "a sink's gradient without the gradient of its share": Bug(
        "megatron.kernels.sinks.sink_grads",
        "(sinks.to(lse.dtype) - lse).exp()",
        "torch.ones_like(lse)",
        "tests/core/kernels/test_scores.py::test_by_the_formula[chunked-dtype1-None-sinks]",
    ),
    "scores that are capped in forward alone": Bug(
        "megatron.kernels.block_attention._Plan.slopes",
        "None if cap is None else (scores / cap).square_().neg_().add_(1.0)",
        "None",
        "tests/core/kernels/test_scores.py::test_by_the_formula[chunked-dtype1-None-cap]",
    ),
    "a loss of logits that are not capped": Bug(
        "megatron.parallel.cross_entropy._local_sums",
        "capped(logits[rows, :valid], loss.softcap, loss.dtype)",
        "logits[rows, :valid]",
        f"{LAYOUTS}[{SCORES}]",
    ),
    "logits that are not capped": Bug(
        "megatron.model.gpt.GPTModel.logits",
        "logits if self.softcap is None else soft_cap(logits, self.softcap)",
        "logits",
        "tests/core/model/test_scores.py::test_losses_and_logits_have_the_same_cap",
    ),
    "logits of a generation that are not capped": Bug(
        "megatron.inference.cached_model.CachedModel._vocabulary",
        "self.model.logits(x)",
        "self.model.output_layer(x)",
        f"{CACHED}[sinks and caps, windows in two of three layers]",
    ),
    "a generation without sinks": Bug(
        "megatron.kernels.reference_attention.cached_attention",
        "_softmax(rows @ keys.transpose(-1, -2) * call.spec.scale, hidden, call)",
        "_softmax(rows @ keys.transpose(-1, -2) * call.spec.scale, hidden, call._replace(sinks=None))",
        f"{CACHED}[a score of 0 in each denominator]",
    ),
    "gradients not summed over the ranks of a sequence": Bug(
        "megatron.parallel.context.ParallelContext.__init__",
        "self._axis('dp_cp', grid.flatten(1, 2), 1)",
        "self.dp",
        f"{LAYOUTS}[{MASKED}]",
    ),
    # Gradient buckets and the distributed optimizer.
    "clip counts every instance's copy": Bug(
        "megatron.training.build.build_optimizer",
        "reduce_sum=lambda x: all_reduce(x, ctx.optimizer)",
        "reduce_sum=lambda x: all_reduce(x, ctx.world)",
        f"{LAYOUTS}[{TWICE}]",
        "sweep",
    ),
    "clip counts one shard": Bug(
        "megatron.training.build.build_optimizer",
        "reduce_sum=lambda x: all_reduce(x, ctx.optimizer)",
        "reduce_sum=lambda x: all_reduce(x, ctx.model)",
        f"{LAYOUTS}[{SHARDS}]",
    ),
    "a bucket is sent one micro-batch early": Bug(
        "megatron.parallel.reduction.Reduction._gradient_ready",
        "self._expected[p] == 0",
        "self._expected[p] == 1",
        f"{LAYOUTS}[{TWICE}]",
        "sweep",
    ),
    "a bucket is sent when its first parameter is complete": Bug(
        "megatron.parallel.reduction.Reduction.expect",
        "len(bucket.params)",
        "1",
        f"{LAYOUTS}[{TWICE}]",
    ),
    "gradients not summed over instances": Bug(
        "megatron.parallel.reduction.Reduction._reduce_over_instances",
        "shard.size > 1 and instances.size > 1 and bucket.shard.start < bucket.shard.stop",
        "False",
        f"{LAYOUTS}[{TWICE}]",
    ),
    # Shared gradients and weights.
    # Megatron-LM 6660, verl 7493
    "gradients doubled per micro-batch in groups of one rank": Bug(
        "megatron.parallel.fsdp.UnitReduction.close",
        "self._in_pass = False",
        "self._in_pass = False\n"
        "[t.mul_(2) for b, t in self._buffers.totals.items() if b.replicas.shard.size == 1]",
        f"{LAYOUTS}[ep2, all-to-all, experts, ZeRO-2]",
    ),
    # Megatron-LM 5974, 4891
    "sums of shared gradients are means": Bug(
        "megatron.parallel.fsdp.UnitReduction.wait",
        "work()",
        "work() / self._ctx.shard.size",
        f"{LAYOUTS}[dp2, ZeRO-3]",
    ),
    # Megatron-LM 3023
    "shared gradients divided once more in each micro-batch": Bug(
        "megatron.parallel.fsdp.UnitReduction.wait",
        "piece.total.add_(work())",
        "piece.total.div_(2).add_(work())",
        f"{LAYOUTS}[dp2, ZeRO-3]",
    ),
    # accelerate 4171, Megatron-Bridge 3826
    "a tied weight is two units": Bug(
        "megatron.config.plan.units.uses",
        "all(unit not in each for each in calls[:number])",
        "True",
        f"{LAYOUTS}[dp2, ZeRO-3]",
    ),
    "shared gradients of tied ends not summed": Bug(
        "megatron.parallel.fsdp.UnitReduction.sum_over_ranks",
        "all_reduce_(total, self._ctx.axis(axis))",
        "pass",
        f"{LAYOUTS}[pp2 dp2, ZeRO-3]",
    ),
    "shared gradients not summed over instances": Bug(
        "megatron.parallel.fsdp.UnitReduction.sum_over_ranks",
        "bucket.replicas.instances.size > 1 and total.numel()",
        "False",
        f"{LAYOUTS}[dp4, ZeRO-3 in 2 instances]",
    ),
    "shared gradients of the step before": Bug(
        "megatron.parallel.fsdp.ShardedBuffers.zero",
        "self.flat.zero_()",
        "",
        f"{LAYOUTS}[dp2, ZeRO-3]",
    ),
    "gradients of experts of the micro-batch before": Bug(
        "megatron.parallel.fsdp.UnitReduction.open",
        "p.is_stale = True",
        "p.is_stale = False",
        f"{LAYOUTS}[ep2 dp2, all-to-all, experts, ZeRO-3]",
    ),
    # DeepSpeed 8090, 8438
    "Muon sees shards of matrices": Bug(
        "megatron.parallel.fsdp.ShardedBuffers.__init__",
        "FlatBuffers.__init__(self, parameters, ctx, grad_dtype, None, assign, units=True)",
        "FlatBuffers.__init__(self, parameters, ctx, grad_dtype, None, None, units=True)",
        f"{LAYOUTS}[dp2, ZeRO-3, Muon]",
    ),
    # DeepSpeed 8443
    "Muon's gradients normalized in each micro-batch": Bug(
        "megatron.parallel.fsdp.UnitReduction.wait",
        "piece.total.add_(work())",
        "piece.total.add_(work() / work().norm().clamp(min=1e-30))",
        f"{LAYOUTS}[dp2, ZeRO-3, Muon]",
    ),
    # Megatron-LM 7452
    "shards saved at the places of another rank's": Bug(
        "megatron.parallel.fsdp.ShardedBuffers._place",
        "part_of(p, spans[number], part[own], total[own])",
        "part_of(p, (0, stop - start), part[own], total[own])",
        "tests/core/parity/test_shards.py::test_shards_are_read_in_every_other_layout"
        "[zero3 dp4 to one]",
    ),
    "weights of a unit are not freed": Bug(
        "megatron.parallel.fsdp.UnitGathering._after_forward_of",
        "self.release(unit)",
        "",
        "tests/core/parity/test_zero.py::test_ranks_hold_what_the_plan_says[dp2, ZeRO-3]",
    ),
    "weights of all units gathered ahead": Bug(
        "megatron.parallel.fsdp.UnitGathering._before_forward_of",
        "use.ahead",
        "self._buffers.units.values()",
        "tests/core/parity/test_zero.py::test_ranks_hold_what_the_plan_says[dp2, ZeRO-3]",
    ),
    # Megatron-LM 6314
    "gradients of a unit are not freed": Bug(
        "megatron.parallel.fsdp.UnitReduction.wait",
        "_empty(piece.grads)",
        "",
        "tests/core/parity/test_zero.py::test_ranks_hold_what_the_plan_says[dp2, ZeRO-2, tied]",
    ),
    "the embedding is gathered again for backward": Bug(
        "megatron.config.plan.units.uses",
        "unit != EMBEDDING",
        "True",
        "tests/core/parity/test_communication.py::test_a_step_sends_what_was_worked_out"
        "[dp2, ZeRO-3, untied]",
    ),
    # Megatron-LM 2769
    "a rank's own part of gathered weights is of the step before": Bug(
        "megatron.parallel.fsdp.UnitGathering._gather",
        "piece.weights[piece.own].copy_(piece.part)",
        "",
        f"{LAYOUTS}[dp2, ZeRO-3]",
    ),
    "shared gradients of the last micro-batch alone": Bug(
        "megatron.parallel.fsdp.UnitReduction.wait",
        "piece.total.add_(work())",
        "piece.total.copy_(work())",
        f"{LAYOUTS}[dp2, ZeRO-3]",
    ),
    "a shard begins one alignment late": Bug(
        "megatron.config.plan.buckets.Layout._spans",
        "low - self.starts[number]",
        "low + 8 - self.starts[number]",
        f"{LAYOUTS}[{SHARDS}]",
    ),
    "weights not gathered": Bug(
        "megatron.training.step._update",
        "run.buffers.gathering.start()",
        "",
        f"{LAYOUTS}[{SHARDS}]",
        "sweep",
    ),
    "weights used before they arrive": Bug(
        "megatron.parallel.gathering.Gathering._before_forward",
        "self._wait_for(buckets)",
        "",
        "tests/core/parallel/test_ddp.py::test_weights_arrive_before_they_are_used",
    ),
    "norm gradients of sequence shards sent before they are summed": Bug(
        "megatron.parallel.reduction.Reduction._gradient_ready",
        "self._missing[bucket] or bucket.layout.partial",
        "self._missing[bucket]",
        f"{LAYOUTS}[{SEQUENCE_SHARDS}]",
    ),
    "a shard is written as if tensor parallelism had not cut the tensor": Bug(
        "megatron.training.checkpointing.save.boxes_of",
        "(start + low, start + high)",
        "(low, high)",
        "tests/core/parity/test_shards.py::test_shards_are_read_in_every_other_layout[tp2 dp2 to dp4]",
    ),
    # Epochs, blends and the index cache.
    "a sample that begins in an epoch counts for it": Bug(
        "megatron.data.epoch.epoch_dataset.EpochDataset._turn_to",
        "(index + 1) * length - 1",
        "index * length",
        f"{EPOCHS}::test_epochs_show_each_document_exactly_so_often[200]",
    ),
    "proportional draws without rounding": Bug(
        "megatron.data.epoch.proportional_draws.Shares.source",
        "draw * left_weight + (total >> 1)",
        "draw * left_weight",
        f"{EPOCHS}::test_shares_are_exact_and_every_draw_is_counted_once",
    ),
    "a changed blend reads each data set from its start": Bug(
        "megatron.data.epoch.epoch_dataset.EpochBlend.source",
        "self._before[dataset] + draw",
        "draw",
        f"{EPOCHS}::test_another_mix_goes_on_where_each_data_set_was_left",
    ),
    "lines that a part ends within are lost": Bug(
        "megatron.data.preprocess.readers.FileReader._cut",
        "_line_end(raw, offset, size) if offset else 0",
        "_line_end(raw, offset, size) if offset == self._span[0] else offset",
        "tests/tools/test_preprocess_reference.py::test_a_random_corpus_is_what_the_reference_makes_of_it",
    ),
    "parts joined without their place in the set": Bug(
        "megatron.data.parts.joined.Joined._built",
        "pair.document_indices[1:] + n",
        "pair.document_indices[1:]",
        "tests/core/data/parts/test_reading.py::test_every_way_to_read_it",
    ),
    "the seed is ignored": Bug(
        "megatron.data.epoch.epoch_dataset.EpochDataset._turn_to",
        "Permutation(size, self.seed, epoch, tokens, self.index_split)",
        "Permutation(size, epoch, tokens, self.index_split)",
        f"{EPOCHS}::test_the_order_does_not_depend_on_the_length_of_the_run",
    ),
    "an index cache key without the contents' hash": Bug(
        "megatron.data.gpt_dataset.GPTDataset.__init__",
        "corpus.identity['idx_sha256']",
        "''",
        "tests/core/data/test_races.py::test_one_of_four_is_killed_while_they_build",
    ),
    "a cache entry that is written in place": Bug(
        "megatron.data.index_cache.IndexCache._write",
        "f'{path}.{uuid.uuid4().hex}.tmp'",
        "path",
        "tests/core/data/test_races.py",
        "sweep",
    ),
    # FP8.
    "a number beyond the format is not clamped": Bug(
        "megatron.kernels.fp8.quantize",
        "(x.float() * scale).clamp_(-limit, limit)",
        "x.float() * scale",
        f"{FP8}::test_casts_round_as_the_format_says",
    ),
    "FP8 gradients in the format of the forward pass": Bug(
        "megatron.kernels.fp8._Fp8Linear.backward",
        "formats.backward",
        "formats.forward",
        f"{FP8}::test_a_layer_is_three_products_of_casts",
    ),
    "the weight's scale for the input": Bug(
        "megatron.kernels.fp8._Fp8Linear.forward",
        "q.inverse",
        "weight_cast.inverse",
        f"{FP8}::test_a_layer_is_three_products_of_casts",
    ),
    "fast accumulation in a backward GEMM": Bug(
        "megatron.kernels.fp8._Fp8Linear.backward",
        "gemm(grad.rows, weight_columns, grad.inverse, inverse, x.dtype)",
        "gemm(grad.rows, weight_columns, grad.inverse, inverse, x.dtype, True)",
        f"{FP8}::test_only_the_forward_product_accumulates_fast",
    ),
    "FP8 weights kept after the step": Bug(
        "megatron.parallel.fp8.weights_cast_once",
        "layer.weight_cast = None",
        "",
        f"{RUNS}::test_a_step_casts_each_weight_once",
    ),
    "a clamp that hides an infinity": Bug(
        "megatron.kernels.fp8.scale_of",
        "scale + (amax - amax)",
        "scale",
        f"{FP8}::test_what_is_not_finite_is_not_hidden",
    ),
    "FP8 maxima of one rank": Bug(
        "megatron.parallel.fp8.LayerScaling.__init__",
        "(ctx.tp, ctx.cp)",
        "()",
        f"{SCALES}::test_ranks_cast_to_the_numbers_of_one",
    ),
    "FP8 history of one rank": Bug(
        "megatron.parallel.fp8.DelayedScaling.step",
        "(self.ctx.tp, self.ctx.dp_cp)",
        "()",
        f"{SCALES}::test_ranks_cast_to_the_numbers_of_one",
    ),
    "FP8 maxima not reset after a step": Bug(
        "megatron.parallel.fp8.DelayedScaling.forget_step",
        "self.step_amax.zero_()",
        "",
        f"{SCALES}::test_delayed_scales_by_hand",
        "campaign",
    ),
    "an infinity in the FP8 history": Bug(
        "megatron.parallel.fp8.DelayedScaling.step",
        "torch.where(self.step_amax.isfinite(), self.step_amax, 0.0)",
        "self.step_amax",
        f"{SCALES}::test_delayed_scales_by_hand",
    ),
    "FP8 scales not used after loading": Bug(
        "megatron.training.checkpointing.load._read_tensors",
        "run.fp8.loaded()",
        "",
        f"{RUNS}::test_a_killed_run_goes_on_with_its_scales[bf16]",
    ),
    # Checkpoints.
    "a manifest renamed before the directory is synced": Bug(
        "megatron.checkpoint.store.finish", "disk.fsync_directory(temporary)", "", CRASH
    ),
    "a tracker renamed before the directory is synced": Bug(
        "megatron.checkpoint.store.publish",
        "disk.fsync_directory(root)\ndisk.rename(tracker, root / TRACKER)",
        "disk.rename(tracker, root / TRACKER)",
        CRASH,
    ),
    "a commit that does not check the lock": Bug(
        "megatron.checkpoint.store.publish",
        "fence()",
        "",
        "tests/core/checkpoint/test_lock.py::test_a_paused_holder_that_wakes_up_cannot_commit",
    ),
    "a lock number that two processes can take": Bug(
        "megatron.checkpoint.lock.acquire",
        "os.O_WRONLY | os.O_CREAT | os.O_EXCL",
        "os.O_WRONLY | os.O_CREAT",
        "tests/core/checkpoint/test_lock.py::test_two_that_see_each_other_do_not_both_hold",
    ),
    "checksums not compared": Bug(
        "megatron.checkpoint.safetensors_reader.SafetensorsFile.read_into",
        "have != sums[number]",
        "False",
        "tests/campaigns/hostile/test_campaign.py::test_every_file_is_read_or_refused",
    ),
    "a partly loaded model is kept": Bug(
        "megatron.training.checkpointing.load._take_newest_good",
        "not failed",
        "checkpoint",
        "tests/campaigns/hostile/test_campaign.py::test_every_file_is_read_or_refused",
    ),
    "a local copy whose bytes are not checked before it is chosen": Bug(
        "megatron.checkpoint.local_copies.verify",
        "reader.verify()",
        "pass",
        f"{LOCAL}::test_a_part_is_verified",
    ),
    "a local copy of an abandoned history": Bug(
        "megatron.training.checkpointing.local_copies.LocalCopies.start_line",
        "newest is None or not resumed or newest.iteration != self._run.progress.iteration",
        "newest is None or not resumed",
        f"{LOCAL}::test_copies_of_a_line_that_was_left",
    ),
    "a newest checkpoint that may be removed": Bug(
        "megatron.checkpoint.retention.prune",
        "{*present[-keep_last:], newest, " + EVERY,
        "{*present[-keep_last - 1:-1], " + EVERY,
        f"{STORE}::test_prune_keeps_the_newest_the_multiples_and_the_trackers",
    ),
    # Packed samples.
    "the last token of a row has no label": Bug(
        "addons.finetuning.packed_dataset.PackedFile.__getitem__",
        "count + with_label",
        "count",
        f"{ROWS}::test_the_worked_example_label_by_label",
    ),
    "positions not restarted in the next row of a sample": Bug(
        "addons.finetuning.packed_dataset.PackedFile.__getitem__",
        "np.arange(count)",
        "np.arange(first, first + count)",
        f"{ROWS}::test_the_worked_example_label_by_label",
    ),
    "samples of exactly the minimum length omitted": Bug(
        "addons.finetuning.packed_dataset.PackedFile.__init__",
        "lengths >= rule.min_length",
        "lengths > rule.min_length",
        f"{ROWS}::test_rows_are_those_of_a_plain_packer",
    ),
    "each epoch in the order of the first": Bug(
        "addons.finetuning.packed_dataset.PackedDataset._turn_to",
        "self._random",
        "np.random.RandomState(SEED)",
        f"{ROWS}::test_epochs_are_whole_batches_of_one_generator_that_goes_on",
    ),
    "attention crosses pieces": Bug(
        "megatron.training.batch._packed_masks",
        "positions == 0",
        "positions < 0",
        f"{PACKED_RUNS}::test_another_sample_changes_no_bit",
    ),
    "positions go on over pieces": Bug(
        "megatron.training.batch._packed_masks",
        "((labels != NO_LABEL).float(), positions, (positions == 0).cumsum(1))",
        "((labels != NO_LABEL).float(), torch.arange(positions.shape[1]).expand_as(positions) % 16, "
        "(positions == 0).cumsum(1))",
        f"{PACKED_RUNS}::test_a_row_has_the_loss_of_its_pieces_one_by_one[pieces-rope]",
    ),
    "tokens of packed samples without a label have a loss": Bug(
        "megatron.training.batch._packed_masks",
        "labels != NO_LABEL",
        "labels == labels",
        f"{PACKED_RUNS}::test_a_row_has_the_loss_of_its_pieces_one_by_one[pieces-rope]",
        "campaign",
    ),
    "label 0 is a target": Bug(
        "megatron.training.batch._packed_masks",
        "labels != NO_LABEL",
        "labels >= NO_LABEL",
        "addons/internlm/tests/test_demo_steps.py::test_the_twelve_steps_of_the_demo_logs",
    ),
    "every token of a chat is trained": Bug(
        "addons.finetuning.encode.ChatEncoder.encode",
        "return (ids, trained)",
        "return (ids, np.ones_like(trained))",
        f"{CHAT}::test_the_loss_is_that_of_the_assistants_tokens_alone[pad_samples]",
    ),
    "the end token of a chat's turn is not trained": Bug(
        "addons.finetuning.templates.ChatTemplate._derived",
        "after[:end.end()]",
        "after[:end.start()]",
        "addons/finetuning/tests/test_templates.py::"
        "test_each_assistant_turn_and_its_end_token_and_nothing_else[chatml]",
    ),
    "id 0 in an answer is not trained": Bug(
        "addons.finetuning.loss_mask.mark",
        "np.where(ids == 0, TRAINED_ZERO, ids)",
        "ids",
        f"{CHAT}::test_the_loss_is_that_of_the_assistants_tokens_alone[pad_samples]",
        "campaign",
    ),
    "losses of subsets counted on every tensor-parallel rank": Bug(
        "megatron.training.logging.subset_metrics.SubsetMetrics.close",
        "not self._sums",
        "self._sums is None",
        f"{PACKED_RUNS}::test_every_layout_trains_alike_and_keeps_samples_apart[tp 2]",
    ),
    # Adapters of optional libraries.
    "Transformer Engine without sequence parallelism": Bug(
        "megatron.kernels.transformer_engine.Linear.__init__",
        "sequence_parallel=sequence_parallel",
        "sequence_parallel=False",
        f"{RANKS}::test_two_ranks_of_its_layers_give_the_numbers_of_one_of_ours[True]",
    ),
    "a gated weight's gradient added to a copy": Bug(
        "megatron.kernels.transformer_engine.Linear.forward",
        "self.weight.main_grad.flatten(0, -2)",
        "self.weight.main_grad.flatten(0, -2).clone()",
        f"{ADAPTERS}::test_weight_gradients_of_micro_batches_come_together_where_they_lie[True]",
    ),
    "document boundaries one token late": Bug(
        "megatron.kernels.cu_seqlens._read_lengths",
        "starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]",
        "starts[:, 2:] = document_ids[:, 1:-1] != document_ids[:, :-2]",
        f"{ADAPTERS}::test_flash_attn_is_the_formula",
    ),
    "a row-parallel layer as wide as its part": Bug(
        "megatron.kernels.transformer_engine.Linear.__init__",
        "columns * (size if mode == 'row' else 1)",
        "columns",
        f"{RANKS}::test_two_ranks_of_its_layers_give_the_numbers_of_one_of_ours[False]",
    ),
    "zero-centered norm weights not declared as such": Bug(
        "megatron.kernels.transformer_engine.TransformerEngine.norm",
        f"{NORM}zero_centered_gamma=zero_centered)",
        f"{NORM}zero_centered_gamma=False)",
        f"{ADAPTERS}::test_a_model_of_library_kernels_is_our_model",
    ),
    "attention without its scale": Bug(
        "megatron.kernels.transformer_engine.EngineAttention.__init__",
        "softmax_scale=spec.scale",
        "softmax_scale=1.0",
        f"{ADAPTERS}::test_transformer_engines_attention_is_the_formula",
    ),
    "gradient accumulation fusion that cannot be disabled": Bug(
        "megatron.parallel.layers._linear",
        "getattr(weight, 'main_grad', None) if accumulate else None",
        "getattr(weight, 'main_grad', None)",
        "tests/core/kernels/test_kernels.py::test_weight_gradients_are_added_by_the_layer_or_by_autograd",
    ),
    "a compiled layer keeps a view of main_grad": Bug(
        "megatron.parallel.layers._linear",
        "accumulate_into=main_grad",
        "accumulate_into=None if main_grad is None else main_grad.flatten(0, -2)",
        "tests/core/training/test_torch_compile.py::test_layers_of_a_kind_are_one_graph[geglu with biases]",
    ),
    # Skipped iterations.
    "data of skipped iterations are read": Bug(
        "megatron.training.loop.Trainer.open_training_samples",
        "return " + LOAD,
        "for start, end in run.plan.skips.ranges:\n"
        "    before = run.plan.consumed_samples\n"
        "    [self.data.train[n] for n in range(before(start - 1), before(end))]\n"
        "return " + LOAD,
        f"{SKIPPING}::test_the_data_are_those_of_the_whole_run_and_skipped_ones_unread",
    ),
    "skipped iterations do not move the data": Bug(
        "megatron.training.batch.training_samples",
        "skips.containing(iteration)",
        "SkipRanges().containing(iteration)",
        f"{SKIPPING}::test_the_data_are_those_of_the_whole_run_and_skipped_ones_unread",
        "campaign",
    ),
    "a learning rate that stands still where iterations are skipped": Bug(
        "megatron.training.run.Run.advance",
        "plan.scheduled_samples(first, last)",
        "0 if result.skipped == 'user' else plan.scheduled_samples(first, last)",
        f"{SKIPPING}::test_columns_are_those_of_the_whole_run",
    ),
    "a gradient norm in the log of a skipped iteration": Bug(
        "megatron.training.skipping.Skipping.skip",
        "skipped='user'",
        "skipped='user', grad_norm=1.0",
        f"{SKIPPING}::test_lines_of_skipped_iterations_have_no_loss_and_no_norm",
    ),
    "an update with zero gradients in place of a skipped iteration": Bug(
        "megatron.training.skipping.Skipping.skip",
        "run = self._run",
        "run = self._run\n"
        "for part in run.buffers.owned:\n    part.main_grad.zero_()\nrun.optimizer.step()",
        f"{SKIPPING}::test_nothing_of_the_state_changes",
    ),
    # Gradients and moments in 16 bits.
    "an fp16 second moment stored without its root": Bug(
        "megatron.optimizer.precision_aware.store",
        "values.sqrt_() if key == 'exp_avg_sq' else values",
        "values",
        f"{SIXTEEN}::test_fp16_stores_moments_of_small_and_of_the_largest_gradients",
    ),
    "a step count that advances twice": Bug(
        "megatron.optimizer.precision_aware.PrecisionAwareAdamW.update",
        "self.state[param]['step'].clone()",
        "self.state[param]['step']",
        f"{SIXTEEN}::test_loss_scale_and_overflow",
    ),
    "a norm of strided gradients over other memory": Bug(
        "megatron.optimizer.clip_grads.sum_of_squares",
        "grad.is_contiguous()",
        "True",
        "tests/core/optimizer/test_clip_grads.py::test_the_norm_of_strided_gradients",
    ),
    # muP.
    "muP without its factor on the logits": Bug(
        "megatron.config.model_flags.ModelFlags.logits_divisor",
        "self.logits_scaling * self.mup_width",
        "self.logits_scaling",
        f"{MUP}[tied]",
    ),
    "muP without the smaller epsilon": Bug(
        "megatron.config.mup.multipliers.of",
        "Multipliers(1.0 if own_lr else 1.0 / m, 1.0 / m)",
        "Multipliers(1.0 if own_lr else 1.0 / m)",
        f"{MUP}[tied]",
    ),
    "muP's learning rate on embeddings too": Bug(
        "megatron.config.mup.multipliers.of",
        "not name.startswith('embedding.')",
        "True",
        f"{MUP}[tied]",
    ),
    "muP's learning rate on top of a decoupled one": Bug(
        "megatron.config.mup.multipliers.of",
        "1.0 if own_lr else 1.0 / m",
        "1.0 / m",
        f"{MUP}[decoupled]",
    ),
    # Loss spikes: what one step does.
    "a skipped update that is multiplied by zero instead": Bug(
        "megatron.optimizer.optimizer.MixedPrecisionOptimizer.step",
        SKIP,
        "factor = 0.0",
        f"{NO_UPDATE}[adam]",
        "campaign",
    ),
    "moments that decay in a skipped update": Bug(
        "megatron.optimizer.optimizer.MixedPrecisionOptimizer.step",
        SKIP,
        "for state in self.inner.state.values():\n    state['exp_avg'].mul_(0.9)\n" + SKIP,
        f"{NO_UPDATE}[adam]",
        "sweep",
    ),
    "a loss scale that counts a skipped update": Bug(
        "megatron.optimizer.optimizer.MixedPrecisionOptimizer.step",
        SKIP,
        "self.grad_scaler and self.grad_scaler.update(found_inf)\n" + SKIP,
        f"{NO_UPDATE}[fp16 with its scale]",
    ),
    "no gradient norm without clipping": Bug(
        "megatron.optimizer.optimizer.MixedPrecisionOptimizer.step",
        "self.grad_scaler is not None or self.clip_grad > 0.0 or admit",
        "self.grad_scaler is not None or self.clip_grad > 0.0",
        f"{NO_UPDATE}[no clipping]",
    ),
    "a flagged value enters the detector's window": Bug(
        "megatron.features.spikes.detector.SpikeDetector.check",
        "kind not in ('loss', 'grad-norm')",
        "True",
        "tests/features/spikes/test_detector.py::test_every_iteration_of_a_cluster_is_found",
    ),
    "the detector's state not loaded": Bug(
        "megatron.features.spikes.policy.SpikePolicy.load_state_dict",
        "self._detector.load_state_dict(state['detector'])",
        "",
        f"{POLICIES}::test_its_state_goes_through_json_and_on_and_an_empty_one_is_a_fresh_start",
    ),
    "a range that begins one iteration late": Bug(
        "megatron.features.spikes.actions.SpikeActions.due",
        "row.mark - 1",
        "row.mark",
        f"{POLICIES}::test_what_is_skipped_begins_before_the_first_mark_and_ends_after_the_last",
    ),
    "a detector state that changes during a save": Bug(
        "megatron.features.spikes.detector.SpikeDetector.state_dict",
        "list(self._loss.values)",
        "self._loss.values",
        f"{POLICIES}::test_a_state_that_was_given_does_not_change",
    ),
    # Loss spikes: rollback in a whole run.
    "a learning rate schedule that adds the loaded steps": Bug(
        "megatron.optimizer.saved_schedule.load",
        "scheduler.num_steps = 0",
        "",
        REWIND,
    ),
    "samples not reopened after a rollback": Bug(
        "megatron.training.loop.Trainer.train",
        "samples = self.open_training_samples()\ncontinue",
        "continue",
        REWIND,
    ),
    "a snapshot without the optimizer": Bug(
        "megatron.features.spikes.rollback._tensors",
        "[tensor for *_, own in save.own_tensors(run) for _, tensor in own]",
        "[tensor for name, *_, own in save.own_tensors(run) for _, tensor in own"
        " if name[:4] != 'opti']",
        REWIND,
    ),
    "the optimizer's counters not rolled back": Bug(
        "megatron.training.checkpointing.load.restore_counters",
        "run.optimizer.load_counters(state.optimizer)",
        "run.optimizer.step_count = state.optimizer['step']",
        REWIND,
    ),
    "the detector not rolled back": Bug(
        "megatron.features.spikes.rollback.RollbackBuffer.roll_back",
        "self._policy.load_state_dict(progress.features.get(NAME, {}))",
        "",
        REWIND,
    ),
    "a snapshot taken during the spike is used": Bug(
        "megatron.features.spikes.rollback.RollbackBuffer.roll_back",
        "n < request.start",
        "n <= request.start",
        REWIND,
    ),
    "checkpoints of a rolled-back segment left for resume": Bug(
        "megatron.config.history.History.leads_to",
        "name == branch and iteration <= last",
        "name == branch",
        f"{HISTORY}::test_random_sequences_of_runs",
    ),
    "a long spike charged to the limit iteration by iteration": Bug(
        "megatron.features.spikes.policy.SpikePolicy.check",
        "if finding.kind == 'non-finite':\n    self._spent.append(iteration)",
        "self._spent.append(iteration)",
        f"{ACTIONS}::test_a_lasting_shift_of_the_loss_ends_no_run",
    ),
}
