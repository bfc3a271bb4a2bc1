"""The commands and the code of the page on the time after pretraining run in order, on a small model."""

import json
import os
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
from script_helpers import rows, run_here
from text_cases import published_folder


PAGE = Path(__file__).parents[2] / "docs" / "after_pretraining.md"
# The byte tokenizer reads any role, so the template ends each message by the end of text.
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_inputs() -> None:
    """The files that the page names, in the current folder."""
    published_folder(Path("M"), chat_template__jinja=TEMPLATE)
    ask = {"role": "user", "content": "How?"}
    answer = lambda text: {"role": "assistant", "content": text}
    pair = {"prompt": [ask], "chosen": [answer("So.")], "rejected": [answer("No.")]}
    Path("chats.jsonl").write_text("\n".join([json.dumps({"messages": [ask, answer("Like this.")]})] * 40))
    Path("pairs.jsonl").write_text("\n".join([json.dumps(pair)] * 40))
    Path("prompts.jsonl").write_text(json.dumps({"prompt": [ask]}))
    (reward,) = re.findall(r"```python\n(# reward.py\n.*?)```", PAGE.read_text(), re.DOTALL)
    Path("reward.py").write_text(reward)
    Path("book.txt").write_text("Call me Ishmael. Some years ago, never mind how long precisely. " * 4)


def run_commands(page: str) -> dict[str, str]:
    """Run the page's commands in their order, and return what each printed."""
    printed = {}
    for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            _, script, *arguments = shlex.split(line)
            name = Path(script).name
            devices = [] if name == "convert.py" else ["--simulate", 1]
            done = run_here(name, *arguments, *devices)
            assert done.returncode == 0, f"{line}\n{done.stderr}"
            printed[line] = done.stdout
    return printed


@pytest.mark.grid
@pytest.mark.filterwarnings("default")
def test_the_page_runs_from_its_first_command_to_its_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_inputs()
    page = PAGE.read_text()
    printed = run_commands(page)
    assert len(printed) == 10
    example, *_ = printed.values()
    assert "[[Like this.<|endoftext|>]]" in example
    scores = [row["evaluation/book.txt/perplexity"] for row in rows(Path("runs/tuned"), "evaluation/book.txt/accuracy")]
    *_, before, after, _ = printed.values()
    figure = lambda printed: float(re.findall(r"perplexity (\S+)", printed)[0])
    assert figure(before) == pytest.approx(scores[0], rel=1e-4) and figure(after) != pytest.approx(scores[0], rel=1e-2)
    assert rows(Path("runs/rewarded"), "reward") and Path("runs/rewarded/rewards.png").exists()
    margins = [row["reward_margin"] for row in rows(Path("runs/preferred"), "reward_margin")]
    assert margins[-1] > 0 and {path.name for path in Path("preferred").iterdir()} >= {"chat_template.jinja"}
    if find_spec("transformers") and find_spec("torch"):
        (code,) = re.findall(r"```text\n(import eqformer\n.*?)```", page, re.DOTALL)
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        exec(compile(code, str(PAGE), "exec"), {})
