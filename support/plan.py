"""A run's plan: what the main rank decides before it starts, from the flags, the run's folder, the
weights and measurements of this machine; and checks that the plan can be carried out."""

import os
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from config import TrainConfig, asked_flags, new_run_cure, resolve
from dataloader import TokenFolder
from model import GPT
from support import checkpoint, choices, corpus, evaluate, log, run_folder
from support.cli import typed_as
from support.ending import UserError
from support.files import FolderLock, did_you_mean
from support.pretrained import Pretrained, read_weights
from support.ranks import World


class Plan(NamedTuple):
    config: TrainConfig
    reasons: dict[str, str]  # flags that were chosen for this machine, and why
    is_new: bool  # whether out_dir did not exist yet
    start: Path | None  # the checkpoint or weights that the run starts from
    pretrained: Pretrained | None  # what is in start, unless several ranks must read it
    state: dict | None  # state.json, if start is a checkpoint of the run
    data: TokenFolder
    vocab_size: int
    questions: list[evaluate.Question]


def make_plan(typed: dict, out_dir: Path, lock: FolderLock | None, world: World) -> Plan:
    """Plan a run, or an evaluation if lock is None. Only the main rank calls this. Every mistake in
    flags or files raises UserError here, before the run has written anything."""
    is_new = not os.path.exists(out_dir)
    if lock and not is_new:
        run_folder.take_folder(out_dir, lock, is_new)  # before another run adds a checkpoint
    pretrained, state = find_start(typed, out_dir)
    config, reasons = resolve(typed | {"out_dir": str(out_dir)}, state, pretrained, world.device)
    if lock:
        config.num_micro_batches(config.micro_batch_size or 1, world.size)  # raises if fractional
    if lock and config.wandb:
        log.tracker()  # raises if neither library is installed
    has_data = not config.data_dir or os.path.exists(config.data_dir)
    if state and "data_dir" not in typed and not has_data:
        cure = "go to the folder in which it was last started, or add --data-dir"
        raise UserError(f"the run's --data-dir {config.data_dir} is not here: {cure}")
    begun_with = state["data"] if state and lock else ""
    data, vocab_size = corpus.open_data(config, pretrained, begun_with)
    config, measured = choices.choose(config, asked_flags(typed, state, world.device), world)
    questions = evaluate.open_questions(config.hellaswag, vocab_size, data.tokenizer)
    if state and lock:
        check_same_run(state, config, typed)
    start = pretrained.path if pretrained else None
    if world.size > 1:
        pretrained = None  # each rank reads start itself, rather than receive the weights
    return Plan(
        config, reasons | measured, is_new, start, pretrained, state, data, vocab_size, questions
    )


def find_start(typed: dict, out_dir: Path) -> tuple[Pretrained | None, dict | None]:
    """Return the weights that a run starts from, and state.json if the run itself saved them."""
    init_from, eval_only = typed.get("init_from"), typed.get("eval_only")
    path = None if init_from and eval_only else checkpoint.newest(out_dir)
    if path is None and init_from:
        return checkpoint.read_newest(init_from), None
    if path is None and eval_only:
        cure = "name a run with --out-dir, or weights with --init-from"
        if not os.path.lexists(out_dir):
            cure += did_you_mean(str(out_dir), "out")
        raise UserError(f"no checkpoint in {out_dir}: {cure}")
    if path is None:
        return None, None
    try:
        return read_weights(path), checkpoint.read_state(path)
    except Exception:
        if os.path.lexists(path):
            raise
        return find_start(typed, out_dir)  # a live run, which we evaluate, has just removed it


def check_same_run(state: dict, config: TrainConfig, typed: dict):
    """Raise UserError if flags would turn the saved run into a different one."""
    for f in fields(TrainConfig):
        saved = state["config"].get(f.name, f.default)
        current = getattr(config, f.name)
        if f.metadata["on_resume"] == "refuse" and saved != current:
            has = "none" if saved == "" else typed_as(f.name, saved)
            text = f"{typed_as(f.name, current)}: the run in {config.out_dir} has {has}"
            flags = typed | {f.name: current}
            cure = new_run_cure(flags, Path(config.out_dir), state["config"])
            raise UserError(f"{text}: leave it out, or {cure}")


def is_complete(plan: Plan, out_dir: Path) -> bool:
    """Return whether a run has finished all its steps and its last evaluation."""
    last_step = plan.config.steps
    if plan.state is None or plan.state["step"] < last_step:
        return False
    has_evaluated = run_folder.read_summary(out_dir).get("steps") == last_step
    return has_evaluated or plan.state["step"] > last_step


def check_files_agree(plan: Plan, world: World):
    """Raise UserError if files on this rank's machine differ from those of the main rank."""
    found = {"the data": world.call_on_all(corpus.open_tokens, plan.data.folder).fingerprint}
    if plan.start and plan.state:
        found["the checkpoint"] = checkpoint.fingerprint(plan.start)
    world.check_same(found)


def check_can_save(model: GPT, plan: Plan, out_dir: Path):
    """Raise an error if the network can't be saved and read back, or if the disk is too full."""
    if not plan.state:
        checkpoint.check_round_trip(model, plan.data.tokenizer, out_dir)
    num_params = sum(p.numel() for p in model.parameters())
    run_folder.check_disk_space(out_dir, num_params, plan.config.keep)
