"""Reinforcement learning with `Engine`, in the shape of GRPO: transformers samples answers with the
weights of the moment, groups of answers to one prompt are compared, and a clipped policy gradient
updates the model. Here an answer is as good as the share of its tokens below 16.

    python examples/policy_gradient.py
    torchrun --nproc-per-node 2 examples/policy_gradient.py --tensor-model-parallel-size 2
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megatron.training import Engine

VOCABULARY, PROMPT, ANSWER = 64, 5, 12
PROMPTS, GROUP, STEPS = 8, 8, 20
SAMPLER = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
SAMPLER |= dict(num_attention_heads=4, rms_norm_eps=1e-5, bos_token_id=None, eos_token_id=None)
FLAGS = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --swiglu "
    "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 "
    f"--tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --seq-length {PROMPT + ANSWER - 1} "
    "--max-position-embeddings 32 "
    f"--micro-batch-size 16 --global-batch-size {PROMPTS * GROUP} --train-iters {STEPS} --lr 3e-3 "
    "--lr-decay-style constant --eval-iters 0 --seed 1"
)


def rollout(sampler, engine, seed):
    """[answers, tokens] of all prompts, the same on every rank, by the weights of the moment."""
    weights = sampler.state_dict()
    for name, tensor in engine.weights():  # one layer at a time
        weights[name].copy_(tensor)
    torch.manual_seed(seed)
    prompts = torch.randint(0, VOCABULARY, (PROMPTS, PROMPT)).repeat_interleave(GROUP, 0)
    return sampler.generate(
        prompts, do_sample=True, top_k=0, max_new_tokens=ANSWER, min_new_tokens=ANSWER
    )


def advantages_of(tokens):
    """(rewards, advantages) [answers]: each against the others of its prompt."""
    rewards = (tokens[:, PROMPT:] < 16).float().mean(1)
    groups = rewards.view(PROMPTS, GROUP)
    normed = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    return rewards, normed.flatten()


def loss_fn(log_probs, data):
    """PPO's clipped loss of the answers' tokens."""
    ratio = (log_probs - data["old_log_probs"]).exp()
    clipped = ratio.clamp(0.8, 1.2)
    gains = torch.minimum(ratio * data["advantages"], clipped * data["advantages"])
    mask = data["loss_mask"]
    return -(gains * mask).sum(), mask.sum()


def main():
    with Engine([*FLAGS.split(), *sys.argv[1:]]) as engine:
        sampler = LlamaForCausalLM(LlamaConfig(**SAMPLER)).eval()
        dp = engine.run.runtime.ctx.dp
        for number in range(STEPS):
            tokens = rollout(sampler, engine, number)
            rewards, advantages = advantages_of(tokens)
            mine = slice(dp.rank * engine.rows, (dp.rank + 1) * engine.rows)
            batch = {"tokens": tokens[mine]}
            batch["advantages"] = advantages[mine, None].expand(-1, PROMPT + ANSWER - 1)
            batch["loss_mask"] = torch.ones(engine.rows, PROMPT + ANSWER - 1)
            batch["loss_mask"][:, : PROMPT - 1] = 0
            batch["old_log_probs"] = engine.eval(batch)["log_probs"]
            engine.forward_backward(batch, loss_fn)
            norm = engine.step().grad_norm
            if engine.run.runtime.rank == 0:
                print(f"step {number + 1} reward {rewards.mean():.3f} norm {norm:.3f}", flush=True)


if __name__ == "__main__":
    main()
