"""Pretrain on the text files of a folder, tokenized when they are read."""

from functools import partial
from pathlib import Path

import torch

from megatron.training import ModelType, get_args, get_tokenizer, pretrain


class Texts(torch.utils.data.Dataset):
    """Sample k begins anywhere in any file: a function of seed, split and k alone."""

    def __init__(self, files, number, split):
        self.files, self.number, self.split = files, number, split
        self.length, self.seed = get_args().seq_length, get_args().seed
        self.tokenizer = get_tokenizer()

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        random = torch.Generator().manual_seed(self.seed + 3 * index + self.split)
        ids = []
        while len(ids) <= self.length:
            text = self.files[int(torch.randint(len(self.files), (), generator=random))].read_text()
            start = int(torch.randint(len(text), (), generator=random))
            ids += self.tokenizer.tokenize(text[start : start + 8 * self.length])
            ids.append(self.tokenizer.eod)
        ids = torch.tensor(ids[: self.length + 1])
        mask = (ids[:-1] != self.tokenizer.eod).float()
        return {"tokens": ids[:-1], "labels": ids[1:], "loss_mask": mask}


def add_args(parser):
    parser.add_argument("--texts", required=True, help="folder of .md files")


def train_valid_test_datasets_provider(train_val_test_num_samples):
    files = sorted(f for f in Path(get_args().texts).rglob("*.md") if f.stat().st_size)
    if not files:
        raise ValueError(f"--texts {get_args().texts}: holds no .md file")
    # None: one epoch (--full-validation)
    return [Texts(files, n or len(files), k) for k, n in enumerate(train_val_test_num_samples)]


def loss_func(loss_mask, losses):
    loss, tokens = (losses * loss_mask).sum(), loss_mask.sum()
    return loss, tokens, {"lm loss": (loss.detach(), tokens)}


def forward_step(data_iterator, model):
    tokens, labels, loss_mask, attention_mask, position_ids = next(data_iterator).values()
    losses = model(tokens, position_ids, attention_mask, labels=labels)
    return losses, partial(loss_func, loss_mask)


if __name__ == "__main__":
    provider, model_type = train_valid_test_datasets_provider, ModelType.encoder_or_decoder
    pretrain(provider, None, model_type, forward_step, extra_args_provider=add_args)
