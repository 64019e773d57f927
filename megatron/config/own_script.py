"""What a script with a model or data of its own changes of the command line."""

from dataclasses import replace
from typing import Any

from megatron.arguments import flags_of_group
from megatron.config.script import Script
from megatron.config.tree import Config, FeatureFlags

# Flags that the data sets of a script's own read as they like.
SOURCES = (
    "data_path",
    "train_data_path",
    "valid_data_path",
    "test_data_path",
    "data_args_path",
    "per_split_data_args_path",
    "split",
    "dummy_data",
)


def judged_as(config: Config, script: Script) -> tuple[Config, list[str]]:
    """(the configuration as the rules see it, what is wrong) where a script has its own model or
    data."""
    problems = _of_own_model(config) if script.model_provider else []
    if script.datasets_provider is None and script.complete:
        return config, problems
    judged, of_data = _with_own_data(config)
    return judged, problems + (of_data if script.complete else [])


def _of_own_model(config: Config) -> list[str]:
    """What is wrong where a script has its own model: a verdict on another one."""
    limit = config.training.device_memory
    if limit is None:
        return []
    return [
        f"--device-memory {limit:g}: the plan counts the GPT of the flags, and the script's "
        "model_provider may return another; omit it, or pass None as the provider [own-model]"
    ]


def _with_own_data(config: Config) -> tuple[Config, list[str]]:
    """The configuration as the rules see it where a script has its own data: none of the flags
    names files. And what is wrong with those that choose how ours are read."""
    d = config.data
    of_features = [
        (name, flag.spelling)
        for name, group in vars(config).items()
        if isinstance(group, FeatureFlags)
        for flag in flags_of_group(type(group), name).values()
        if getattr(group, flag.name) != flag.default
        and (group.names_data or "mock_data" in flag.excludes)
    ]
    choosing = ["--dummy-data"] * (d.dummy_data is not None) + [flag for _, flag in of_features]
    wrong = [
        f"{flag}: chooses data of the suite, and the script's train_valid_test_datasets_provider "
        "has its own; omit it, or pass None as the provider [two-data-sources]"
        for flag in choosing
    ]
    if d.data_order == "epoch":
        wrong.append(
            "--data-order epoch: the order is that of the data sets of the script's "
            "train_valid_test_datasets_provider; omit it [two-data-sources]"
        )
    plain: dict[str, Any] = dict.fromkeys(SOURCES)
    plain |= {"mock_data": True, "data_order": "megatron", "tokenizer_type": d.tokenizer}
    without: dict[str, Any] = {name: type(getattr(config, name))() for name, _ in of_features}
    return replace(config, data=replace(d, **plain), **without), wrong
