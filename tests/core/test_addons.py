"""How the core finds add-ons."""

from pathlib import Path

from megatron import addons


def test_a_question_reads_each_folder_once(monkeypatch):
    asked = []
    glob = Path.glob

    def counted(self, pattern, **more):
        asked.append((self, pattern))
        return glob(self, pattern, **more)

    monkeypatch.setattr(Path, "glob", counted)
    addons.modules("feature")
    assert 0 < len(asked) == len(addons.__path__)
