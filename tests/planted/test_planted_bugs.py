"""Each bug is patched into a copy of the product code; the test named beside it must fail there."""
from __future__ import annotations

import pytest

from tests.planted.bugs import Bug, applies, caught

BUGS = {
    "off by one in the sample index": Bug(
        "megatron/data/index_helpers.py", "    return rows\n", "    rows[1:, 1] += 1\n    return rows\n",
        "tests/data/test_gpt_dataset.py::test_golden_indices"),
    "forgotten loss mask": Bug(
        "pretrain_gpt.py", "(losses * batch.loss_mask).sum(), batch.loss_mask.sum()", "losses.sum(), losses.numel()",
        "tests/training/test_step.py::test_loss_and_norm_are_those_of_the_whole_batch"),
    "weight decay on biases": Bug(
        "megatron/optimizer/param_groups.py", 'return not name.endswith(".bias") and len(shape) != 1', "return True",
        "tests/optimizer/test_param_groups.py::test_weight_decay_rule"),
    "gradient not averaged over accumulation": Bug(
        "megatron/training/step.py", "backward_scale = run.optimizer.loss_scale / nominal",
        "backward_scale = run.optimizer.loss_scale / nominal * run.plan.num_microbatches(iteration)",
        "tests/training/test_step.py::test_loss_and_norm_are_those_of_the_whole_batch"),
    "dropout of split heads that does not know the tensor-parallel rank": Bug(
        "megatron/model/attention.py", 'seeds.seed(self.layer, "attention", self.tp_rank)',
        'seeds.seed(self.layer, "attention")',
        "tests/parallel/test_layers.py::test_ranks_drop_alike_where_they_hold_the_same"),
}
SEQUENCE = "tp4 sp, untied, masked documents"
LAYOUTS = "tests/parity/test_layouts.py::test_a_layout_gives_the_numbers_of_one_process"
TENSOR_PARALLEL = {
    "norm gradients of sequence shards not summed": Bug(
        "megatron/parallel/ddp.py", "for axis in bucket.place.partial:", "for axis in ():", f"{LAYOUTS}[{SEQUENCE}]"),
    "sequence parallelism forgets that whole parameters see part of the tokens": Bug(
        "megatron/parallel/sharding.py", 'partial = (*partial, "tp")', "pass", f"{LAYOUTS}[{SEQUENCE}]"),
    "copies counted twice in the norm": Bug(
        "megatron/parallel/sharding.py", "return all(getattr(ctx, axis).rank == 0 for axis in copies)", "return True",
        f"{LAYOUTS}[tp2]"),
    "norm of one rank's part": Bug(
        "megatron/training/build.py", "reduce_sum=lambda x: all_reduce(x, ctx.optimizer)", "reduce_sum=lambda x: x",
        f"{LAYOUTS}[tp2]"),
    "replicated bias added on every rank": Bug(
        "megatron/parallel/layers.py", "y = _linear(x, self.weight, scaling",
        "y = _linear(x, self.weight, self.bias, scaling",
        f"{LAYOUTS}[tp2]"),
    "padding inside the softmax": Bug(
        "megatron/kernels/cross_entropy.py", "valid = min(max(vocab_size - vocab_start, 0), logits.shape[1])",
        "valid = logits.shape[1]", f"{LAYOUTS}[tp2]"),
    "loss counted on every tensor-parallel rank": Bug(
        "megatron/training/step.py", "if run.runtime.ctx.tp.rank:", "if False:", f"{LAYOUTS}[tp2]"),
    "input gradient not summed": Bug(
        "megatron/parallel/layers.py", "lambda grad: start_all_reduce(grad, tp)", "lambda grad: lambda: grad",
        f"{LAYOUTS}[tp2]"),
    "position embedding not cut with the sequence": Bug(
        "megatron/model/embedding.py", "my_slice(positions, self.ctx.tp)", "positions[:x.shape[0]]",
        f"{LAYOUTS}[{SEQUENCE}]"),
    "overflow found on one rank alone": Bug(
        "megatron/training/build.py", 'reduce_max=lambda x: all_reduce(x, ctx.optimizer, "max")', "reduce_max=lambda x: x",
        "tests/parity/test_layouts.py::test_an_overflow_on_one_rank_skips_the_step_on_all"),
    "a wish of one tensor-parallel rank alone": Bug(
        "megatron/training/step.py", "all_reduce_(totals, run.runtime.ctx.world)",
        "all_reduce_(totals, run.runtime.ctx.dp_cp)", "tests/training/test_step.py::test_ranks_of_a_model_agree"),
}
ALL_LAYOUTS = "tests/parity/test_layouts.py::test_every_layout_gives_the_numbers_of_one_process"
PIPELINE = {
    "a tied embedding not summed": Bug(
        "megatron/config/parameters.py", 'partial=("ends",) if model.tied else ()', "partial=()", f"{LAYOUTS}[pp2]"),
    "a tied embedding counted twice in the norm": Bug(
        "megatron/parallel/sharding.py", "for axis in copies)", 'for axis in copies - {"ends"})', f"{LAYOUTS}[pp2]"),
    "too few warm-up forwards": Bug(
        "megatron/config/stages.py", "2 * after + (chunks - 1) * stages", "2 * after + chunks - 1", f"{LAYOUTS}[pp2 vpp2]"),
    "a warm-up that only makes stages idle": Bug(
        "megatron/config/stages.py", "2 * after + (chunks - 1) * stages", "after + (chunks - 1) * stages",
        "tests/parallel/test_schedules.py"),
    "a swapped virtual chunk": Bug(
        "megatron/training/step.py", "run.model[chunk])",
        "run.model[chunks - 1 - chunk if run.runtime.ctx.pp.rank == 1 else chunk])", f"{ALL_LAYOUTS}[pp4 vpp2]"),
    "backward begins with the first virtual chunk": Bug(
        "megatron/parallel/schedules.py", 'Step("backward", m, chunks - 1 - chunk)', 'Step("backward", m, chunk)',
        f"{LAYOUTS}[pp2 vpp2]"),
    "the same dropout in every micro-batch of a pipeline": Bug(
        "megatron/training/step.py", "dropout(micro_batch),", "dropout(micro_batch * (chunks == 1)),",
        f"{ALL_LAYOUTS}[pp2 vpp2, dropout]"),
    "a gradient that a stage hands on without its residual branch": Bug(
        "megatron/parallel/pipeline.py", "self.input_gradients[key] = hidden.grad",
        "self.input_gradients[key] = hidden.grad - (0 if gradient is None else gradient)", f"{ALL_LAYOUTS}[pp4]"),
    "a loss scale applied on every stage": Bug(
        "megatron/training/step.py", "torch.autograd.backward(output, gradient)",
        "torch.autograd.backward(output, gradient * backward_scale)", f"{LAYOUTS}[pp2]"),
    "the loss is known to the last stage alone": Bug(
        "megatron/training/step.py", "all_reduce_(totals, run.runtime.ctx.world)",
        "all_reduce_(totals, run.runtime.ctx.dp_cp)", "tests/training/test_step.py::test_ranks_of_a_model_agree"),
}

MASKED = "cp2, untied, masked documents"
CONTEXT_PARALLEL = {
    "loss counted as often as there are context-parallel ranks": Bug(
        "pretrain_gpt.py", "(losses * batch.loss_mask).sum(), ", "(losses * batch.loss_mask).sum() * model.ctx.cp.size, ",
        f"{LAYOUTS}[{MASKED}]"),
    "tokens counted as if each rank had all of them": Bug(
        "pretrain_gpt.py", "batch.loss_mask.sum()\n", "batch.loss_mask.sum() * model.ctx.cp.size\n",
        f"{LAYOUTS}[{MASKED}]"),
    "parts of a softmax joined by the larger sum": Bug(
        "megatron/kernels/block_attention.py", "torch.logaddexp(lse, part_lse, out=lse)",
        "torch.maximum(lse, part_lse, out=lse)", f"{LAYOUTS}[{MASKED}]"),
    "parts of a softmax joined with equal weights": Bug(
        "megatron/kernels/block_attention.py", "torch.sigmoid(part_lse - lse)", "torch.sigmoid(lse - lse)",
        f"{LAYOUTS}[{MASKED}]"),
    "chunks of a rank in another order than the masks think": Bug(
        "megatron/parallel/zigzag.py", "chunks[2 * ranks - 1 - rank]", "chunks[ranks + rank]", f"{LAYOUTS}[{MASKED}]"),
    "positions that are not those of the tokens": Bug(
        "megatron/training/batch.py", "for x in (tokens, labels, loss_mask, position_ids))",
        "for x in (tokens, labels, loss_mask, position_ids.roll(rules.cp.rank, 1)))", f"{LAYOUTS}[{MASKED}]"),
    "gradients of keys and values that do not come home": Bug(
        "megatron/parallel/ring_attention.py", "_add_part(self.own, self.arriving(), self.part)", "self.arriving()",
        f"{LAYOUTS}[{MASKED}]"),
    "gradients not summed over the ranks of a sequence": Bug(
        "megatron/parallel/context.py", 'self._axis("dp_cp", grid.flatten(1, 2), 1)', "self.dp", f"{LAYOUTS}[{MASKED}]"),
}
SHARDS, TWICE = "dp2, distributed optimizer", "dp4, distributed optimizer in 2 instances, overlap"
SEQUENCE_SHARDS = "tp2 sp dp2, distributed optimizer, overlap, rotary swiglu RMSNorm GQA"
SHARDED = {
    "clip counts every instance's copy": Bug(
        "megatron/training/build.py", "reduce_sum=lambda x: all_reduce(x, ctx.optimizer)",
        "reduce_sum=lambda x: all_reduce(x, ctx.world)", f"{LAYOUTS}[{TWICE}]"),
    "clip counts one shard": Bug(
        "megatron/training/build.py", "reduce_sum=lambda x: all_reduce(x, ctx.optimizer)",
        "reduce_sum=lambda x: all_reduce(x, ctx.model)", f"{LAYOUTS}[{SHARDS}]"),
    "a bucket is sent one micro-batch early": Bug(
        "megatron/parallel/ddp.py", "bucket.missing -= self._expected[p] == 0", "bucket.missing -= self._expected[p] == 1",
        f"{LAYOUTS}[{TWICE}]"),
    "a bucket is sent when its first parameter is complete": Bug(
        "megatron/parallel/ddp.py", "bucket.missing = len(bucket.params)", "bucket.missing = 1", f"{LAYOUTS}[{TWICE}]"),
    "gradients not summed over instances": Bug(
        "megatron/parallel/ddp.py", "if ctx.shard.size > 1 and ctx.instances.size > 1:", "if False:", f"{LAYOUTS}[{TWICE}]"),
    "a shard begins one alignment late": Bug(
        "megatron/config/buckets.py", "start = max(low - self.starts[number], 0)",
        "start = max(low + 8 - self.starts[number], 0)", f"{LAYOUTS}[{SHARDS}]"),
    "weights not gathered": Bug(
        "megatron/training/step.py", "run.buffers.gather_weights()", "pass", f"{LAYOUTS}[{SHARDS}]"),
    "weights used before they arrive": Bug(
        "megatron/parallel/ddp.py", "args: Any) -> None:\n    _wait_for(buckets)", "args: Any) -> None:\n    pass",
        "tests/parallel/test_ddp.py::test_weights_arrive_before_they_are_used"),
    "what sequence shards hold of a norm's gradient is sent before it is summed": Bug(
        "megatron/parallel/ddp.py", "if bucket.missing or bucket.place.partial:", "if bucket.missing:",
        f"{ALL_LAYOUTS}[{SEQUENCE_SHARDS}]"),
    "a shard is written as if tensor parallelism had not cut the tensor": Bug(
        "megatron/training/checkpointing.py", "tuple((start + low, start + high)", "tuple((low, high)",
        "tests/parity/test_shards.py::test_shards_are_read_in_every_other_layout[tp2 dp2 to dp4]"),
}
EPOCHS = "tests/data/test_epoch_order.py"
DATA = {
    "a sample that begins in an epoch counts for it": Bug(
        "megatron/data/epoch_dataset.py", "epoch = ((index + 1) * length - 1) // tokens", "epoch = index * length // tokens",
        f"{EPOCHS}::test_epochs_show_each_document_exactly_so_often[200]"),
    "shares that forget where they began": Bug(
        "megatron/data/shares.py", "divmod(draw * left + (total >> 1), total)", "divmod(draw * left, total)",
        f"{EPOCHS}::test_shares_are_exact_and_every_draw_is_counted_once"),
    "another mix reads each data set from its start": Bug(
        "megatron/data/epoch_dataset.py", "self._before[dataset] + draw", "draw",
        f"{EPOCHS}::test_another_mix_goes_on_where_each_data_set_was_left"),
    "the seed does not matter": Bug(
        "megatron/data/epoch_dataset.py", "Permutation(size, self.seed, epoch", "Permutation(size, epoch",
        f"{EPOCHS}::test_the_order_does_not_depend_on_the_length_of_the_run"),
    "an index cache that does not know the contents": Bug(
        "megatron/data/gpt_dataset.py", 'idx_sha256=corpus.identity["idx_sha256"]', 'idx_sha256=""',
        "tests/data/test_races.py::test_one_of_four_is_killed_while_they_build"),
    "a cache entry that is written in place": Bug(
        "megatron/data/index_cache.py", 'aside = f"{path}.{uuid.uuid4().hex}.tmp"', "aside = path",
        "tests/data/test_races.py"),
}
FP8, SCALES, RUNS = "tests/kernels/test_fp8.py", "tests/parallel/test_fp8.py", "tests/training/test_fp8.py"
BITS = {
    "a number beyond the format is not clamped": Bug(
        "megatron/kernels/fp8.py", "(x.float() * scale).clamp_(-limit, limit).to(dtype)", "(x.float() * scale).to(dtype)",
        f"{FP8}::test_casts_round_as_the_format_says"),
    "gradients in the format of the forward pass": Bug(
        "megatron/kernels/fp8.py", "quantize(wide, formats.backward, scale)", "quantize(wide, formats.forward, scale)",
        f"{FP8}::test_a_layer_is_three_products_of_casts"),
    "the input's scale for the weight": Bug(
        "megatron/kernels/fp8.py", "quantize(weight, format8, scales[1])", "quantize(weight, format8, scales[0])",
        f"{FP8}::test_a_layer_is_three_products_of_casts"),
    "a clamp that hides an infinity": Bug(
        "megatron/kernels/fp8.py", "return scales + (amax - amax)", "return scales",
        f"{FP8}::test_what_is_not_finite_is_not_hidden"),
    "maxima of one rank": Bug(
        "megatron/parallel/fp8.py", "for axis in (ctx.tp, ctx.cp) if axis.size > 1", "for axis in ()",
        f"{SCALES}::test_ranks_cast_to_the_numbers_of_one"),
    "a history of one rank": Bug(
        "megatron/parallel/fp8.py", "for axis in (self.ctx.tp, self.ctx.dp_cp):", "for axis in ():",
        f"{SCALES}::test_ranks_cast_to_the_numbers_of_one"),
    "a step's maxima that stay for the next": Bug(
        "megatron/parallel/fp8.py", "self.seen.zero_()", "pass", f"{SCALES}::test_delayed_scales_by_hand"),
    "an infinity in the history": Bug(
        "megatron/parallel/fp8.py", "torch.where(self.seen.isfinite(), self.seen, 0.0)", "self.seen",
        f"{SCALES}::test_delayed_scales_by_hand"),
    "scales that are saved and not used again": Bug(
        "megatron/training/checkpointing.py", "        run.fp8.loaded()", "        pass",
        f"{RUNS}::test_a_killed_run_goes_on_with_its_scales[bf16]"),
}
OF_LAYOUTS = TENSOR_PARALLEL | PIPELINE | CONTEXT_PARALLEL | SHARDED
IN_CI = {        # the others are make test-all's
    "norm gradients of sequence shards not summed", "copies counted twice in the norm",
    "replicated bias added on every rank",
    "padding inside the softmax", "a tied embedding not summed", "too few warm-up forwards", "a swapped virtual chunk",
    "loss counted as often as there are context-parallel ranks", "chunks of a rank in another order than the masks think",
    "clip counts every instance's copy", "a bucket is sent one micro-batch early", "weights not gathered",
}


CRASH = "tests/checkpoint/test_crashes.py::test_every_crash_leaves_the_old_or_the_new_one[two ranks]"
STORE = {
    "a manifest that is named before the names beside it are on the disk": Bug(
        "megatron/checkpoint/store.py", "whole.dump())\n    disk.fsync_directory(temporary)", "whole.dump())", CRASH),
    "a tracker that names what is not on the disk": Bug(
        "megatron/checkpoint/store.py", "        disk.fsync_directory(root)\n        disk.rename(tracker, root / TRACKER)",
        "        disk.rename(tracker, root / TRACKER)", CRASH),
    "a commit that does not ask for the lock": Bug(
        "megatron/checkpoint/store.py", "        fence()\n", "        pass\n",
        "tests/checkpoint/test_lock.py::test_a_holder_that_was_replaced_cannot_commit"),
    "a lock whose number a new one shares": Bug(
        "megatron/checkpoint/lock.py", "os.O_WRONLY | os.O_CREAT | os.O_EXCL", "os.O_WRONLY | os.O_CREAT",
        "tests/checkpoint/test_lock.py::test_of_several_at_most_one_gets_a_dead_ones_lock"),
    "checksums that are not compared": Bug(
        "megatron/checkpoint/safetensors_file.py", "if have != sums[number]:", "if False:",
        "tests/training/test_damaged_checkpoints.py::test_a_hundred_damages"),
    "a half-loaded model that is kept": Bug(
        "megatron/training/checkpointing.py", "        if not failed:\n            break",
        "        if found:\n            break",
        "tests/training/test_damaged_checkpoints.py::test_a_hundred_damages"),
    "a newest checkpoint that may be removed": Bug(
        "megatron/checkpoint/retention.py", "kept = {*present[-keep_last:], newest,", "kept = {*present[-keep_last - 1:-1],",
        "tests/checkpoint/test_store.py::test_prune_keeps_the_newest_the_multiples_and_the_trackers"),
}

ROWS, PACKED_RUNS = "tests/data/test_packed.py", "tests/training/test_packed.py"
PACKED = {
    "the last token of a row has no label": Bug(
        "megatron/data/packed.py", "ids = self.file.read(sample, first, count + more)",
        "ids = self.file.read(sample, first, count)", f"{ROWS}::test_the_worked_example_label_by_label"),
    "positions go on where a sample goes on in the next row": Bug(
        "megatron/data/packed.py", "lines[POSITIONS, here] = np.arange(count)",
        "lines[POSITIONS, here] = np.arange(first, first + count)", f"{ROWS}::test_the_worked_example_label_by_label"),
    "samples of exactly the shortest length left out": Bug(
        "megatron/data/packed.py", "lengths >= rule.min_length", "lengths > rule.min_length",
        f"{ROWS}::test_rows_are_those_of_a_plain_packer"),
    "each epoch in the order of the first": Bug(
        "megatron/data/packed.py", "shuffle(self._random, self._order)",
        "shuffle(np.random.RandomState(SEED), self._order)",
        f"{ROWS}::test_epochs_are_whole_batches_of_one_generator_that_goes_on"),
    "attention crosses pieces": Bug(
        "megatron/training/batch.py", "(positions == 0).cumsum(1)", "(positions < 0).cumsum(1)",
        f"{PACKED_RUNS}::test_another_sample_changes_no_bit"),
    "label 0 is a target": Bug(
        "megatron/training/batch.py", "(lines[:, LABELS] > 0).float()", "(lines[:, LABELS] >= 0).float()",
        f"{PACKED_RUNS}::test_the_twelve_steps_of_the_demo_logs"),
    "losses of subsets counted on every tensor-parallel rank": Bug(
        "megatron/training/row_counts.py", "if not self._sums:", "if self._sums is None:",
        f"{PACKED_RUNS}::test_every_layout_trains_alike_and_keeps_samples_apart[tp 2]"),
}

ENGINE, ADAPTERS = "megatron/kernels/transformer_engine.py", "tests/kernels/test_libraries.py"
RANKS = "tests/parallel/test_transformer_engine.py"
LIBRARIES = {
    "Transformer Engine that is not told of the cut sequence": Bug(
        ENGINE, "sequence_parallel=sequence_parallel, fuse", "sequence_parallel=False, fuse",
        f"{RANKS}::test_two_ranks_of_its_layers_give_the_numbers_of_one_of_ours[True]"),
    "a gated weight's gradient added to a copy": Bug(
        ENGINE, "self.weight.main_grad.flatten(0, -2)", "self.weight.main_grad.flatten(0, -2).clone()",
        f"{ADAPTERS}::test_weight_gradients_of_micro_batches_come_together_where_they_lie[True]"),
    "documents that begin one token late": Bug(
        "megatron/kernels/documents.py", "starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]",
        "starts[:, 2:] = document_ids[:, 1:-1] != document_ids[:, :-2]",
        f"{ADAPTERS}::test_flash_attn_is_the_formula"),
    "a row-parallel layer as wide as its part": Bug(
        ENGINE, 'columns * (size if mode == "row" else 1)', "columns",
        f"{RANKS}::test_two_ranks_of_its_layers_give_the_numbers_of_one_of_ours[False]"),
    "norm weights minus one taken for whole": Bug(
        ENGINE, "zero_centered_gamma=zero_centered)\n            norm.bias",
        "zero_centered_gamma=False)\n            norm.bias",
        f"{ADAPTERS}::test_a_model_of_library_kernels_is_our_model"),
    "attention without its scale": Bug(
        ENGINE, "softmax_scale=scale", "softmax_scale=1.0",
        f"{ADAPTERS}::test_transformer_engines_attention_is_the_formula"),
    "fusion of gradients that cannot be switched off": Bug(
        "megatron/parallel/layers.py", 'getattr(weight, "main_grad", None) if accumulate else None',
        'getattr(weight, "main_grad", None)', "tests/kernels/test_choice.py::test_who_adds_the_weight_gradient"),
}


@pytest.mark.parametrize("name", [name if number < 2 else pytest.param(name, marks=pytest.mark.campaign)
                                  for number, name in enumerate(BUGS)])
def test_a_planted_bug_is_caught(name, tmp_path):
    caught(BUGS[name], tmp_path)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.campaign if name in IN_CI else pytest.mark.sweep)
                                  for name in OF_LAYOUTS])
def test_a_planted_bug_of_a_layout_is_caught(name, tmp_path):
    caught(OF_LAYOUTS[name], tmp_path)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.campaign if number % 3 == 0 else pytest.mark.sweep)
                                  for number, name in enumerate(BITS)])
def test_the_tests_see_a_bug_in_8_bits(name, tmp_path):
    caught(BITS[name], tmp_path)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.campaign if number < 3 else pytest.mark.sweep)
                                  for number, name in enumerate(LIBRARIES)])
def test_a_planted_bug_of_an_adapter_is_caught(name, tmp_path):
    caught(LIBRARIES[name], tmp_path)


@pytest.mark.campaign
@pytest.mark.parametrize("name", DATA)
def test_a_planted_bug_of_the_data_is_caught(name, tmp_path):
    caught(DATA[name], tmp_path)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.campaign if number < 5 else pytest.mark.sweep)
                                  for number, name in enumerate(PACKED)])
def test_a_planted_bug_of_packed_samples_is_caught(name, tmp_path):
    caught(PACKED[name], tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("name", STORE)
def test_a_planted_bug_of_the_store_is_caught(name, tmp_path):
    caught(STORE[name], tmp_path)


def test_every_bug_still_applies():
    groups = (BUGS, OF_LAYOUTS, BITS, LIBRARIES, DATA, PACKED, STORE)
    stale = [name for group in groups for name, bug in group.items() if not applies(bug)]
    assert stale == []
