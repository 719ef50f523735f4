"""What is looked at beside the training, and when: validation, samples, multiple choice, and at the
end the picture of the loss. It changes no number of the training, and no run ends for it once it
trains: of what fails one line tells. A stop does not wait for it. The next resume does what is left
undone."""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import nn

from dataloader import ShardLoader
from support import evaluate, log


def due(step: int, every: int, last: int) -> bool:
    """Whether something done every so many steps, and after the last one, is to be done now."""
    return step >= last or (every > 0 and step % every == 0)


class Stopped(Exception):
    """A stop was asked for, which the rest of what is under way would only delay."""


@dataclass
class Watcher:
    """Looks at a state: an object with model, step and val_losses, which validations go into."""

    state: object
    net: nn.Module  # what the training calls: the model, compiled
    loader: ShardLoader  # of the validation tokens
    eval_tokens: int
    tokenizer: str
    examples: list  # of multiple choice
    samples: Callable[[object], Callable[[], Iterator[Iterator[str]]]]  # of a world
    autocast: Callable
    world: object
    log: Callable
    out_dir: Path
    every: dict[str, int]  # how many steps, by the name in the log; 0: at the end
    steps: int
    asked: Callable[[], bool] = bool  # whether this rank was asked to stop, which ends a watch

    @property
    def stoppable(self) -> object:
        """The world in which what notes its parts is Stopped between two of them."""
        return replace(self.world, note=self.note)

    def note(self, phase: str):
        if self.asked():
            self.world.note("a save, once the other ranks have heard")  # the watchdog gives it time
            raise Stopped
        self.world.note(phase)

    def catch_up(self):
        """Do what the process before this one did not come to. A validation is made again in any
        case, since a log does not say which checkpoint is best."""
        if (step := self.state.step) == 0:
            return "val_loss" in self.every and self.validate()
        done = self.world.from_main(partial(log.noted, self.out_dir, step))
        again = done & self.every.keys() & {"val_loss"} if step < self.steps else ()
        self.watch(done=done, again=again)

    def watch(self, asked=bool, done: Collection[str] = (), again: Collection[str] = ()) -> bool:
        """Do what is due after this step and not done, and some things again, unless some rank is
        asked to stop. Returns whether one was."""
        self.asked = asked
        how = {"val_loss": self.validate, "sample": self.sample, "hellaswag_acc": self.quiz,
               "picture": self.draw}  # fmt: skip
        for name, every in self.every.items():
            is_due = name not in done and due(self.state.step, every, self.steps)
            if not (is_due or name in again):
                continue
            failed = None
            try:
                how[name]()
            except Exception as error:
                if not getattr(error, "is_agreed", False):  # the log fails, or a rank is lost
                    raise
                failed = error
            if any(self.world.gather(self.asked())):
                return True
            if failed:
                step, kind = self.state.step, type(failed).__name__
                why = f"no {name} after step {step}: {kind}: {failed!s:.200}"
                self.log(" ".join(why.split()), step=step, failed=name)
        return False

    def validate(self):
        step = self.state.step
        figures = evaluate.validation(self.state.model, self.net, self.loader, self.eval_tokens,
                                      self.tokenizer, self.stoppable, self.autocast)  # fmt: skip
        if math.isfinite(figures["val_loss"]):
            self.state.val_losses[step] = figures["val_loss"]
        self.log(
            f"validation after step {step}: {evaluate.in_words(figures)}", step=step, **figures
        )

    def sample(self):
        step = self.state.step
        with evaluate.no_dropout(self.state.model):
            texts = self.world.together(
                lambda: ["".join(p) for p in self.samples(self.stoppable)()]
            )
        found = "\n---\n".join(texts)
        self.log(f"sample after step {step}:\n{found}", step=step, sample=found)

    def quiz(self):
        step = self.state.step
        figures = evaluate.answers(
            self.state.model, self.examples, self.tokenizer, self.stoppable, self.autocast
        )
        text = f"{len(self.examples):,} questions after step {step}: {evaluate.in_words(figures)}"
        self.log(text, step=step, **{f"hellaswag_{name}": n for name, n in figures.items()})

    def draw(self):
        """The losses in loss.png, where matplotlib is installed."""
        path = self.out_dir / "loss.png"
        is_drawn = self.world.together(partial(log.draw_loss, path) if self.world.is_main else bool)
        is_told = self.state.step >= self.steps and not is_drawn  # the last line names the picture
        text = "no loss.png: pip install matplotlib" * is_told
        self.log(text, step=self.state.step, picture=str(path) if is_drawn else "")
