"""The kernel models of one device: a form per family, how far each was off, and the recipe; one file of arrays."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from steptime._models.engine.archive import Archive, StoredParts, write_archive
from steptime._models.engine.splits import Residuals
from steptime._models.engine.stored import pack, unpack
from steptime._models.kernels.call import Call
from steptime._models.kernels.family import families, family_of
from steptime._models.kernels.forms import KernelForm, load_form
from steptime._models.kernels.question import Answer, Question
from steptime.errors import InputError

_RESIDUALS = "residuals"
# In a recipe: families that these models leave to another device's, though the form that they share was fitted.
LEFT_OUT = "left_out"
# Answers that are kept; a step asks some hundreds of distinct questions.
_KEPT = 1 << 16
_COPY = "aten::copy_.default"


@dataclass(frozen=True)
class Answered:
    """What the models said to one question; `answer` is None where none of them can, and `why` says why not."""

    family: str
    answer: Answer | None
    why: str = ""


@dataclass(frozen=True)
class KernelModels:
    """Fitted forms by name."""

    forms: Mapping[str, KernelForm]
    residuals: Residuals
    recipe: Mapping[str, Any]
    _known: dict[Question, Answered] = field(default_factory=dict, repr=False, compare=False)

    def ask(self, questions: Sequence[Question]) -> list[Answered]:
        """Every question, each by the form of its family. What was answered is kept: steps ask the same again and again."""
        new = list(dict.fromkeys(question for question in questions if question not in self._known))
        if len(self._known) + len(new) > _KEPT:
            self._known.clear()
            new = list(dict.fromkeys(questions))
        parts = [with_copies(question) for question in new]
        answered = iter(self._ask([part for each in parts for part in each]))
        self._known.update(
            (question, _joined(list(islice(answered, len(each))))) for question, each in zip(new, parts, strict=True)
        )
        return [self._known[question] for question in questions]

    def _ask(self, questions: Sequence[Question]) -> list[Answered]:
        names = [family_of(question.call.op) for question in questions]
        answers: dict[int, Answered] = {}
        by_form: dict[str, list[int]] = defaultdict(list)
        unknown = self.recipe.get(LEFT_OUT, ())
        for number, family in enumerate(names):
            form = families()[family].form if family else ""
            if form in self.forms and family not in unknown:
                by_form[form].append(number)
            else:
                why = f"no family has {questions[number].call.op}" if not family else f"{family} is not fitted"
                answers[number] = Answered(family, None, why)
        for form, numbers in by_form.items():
            by_number = zip(numbers, answers_of(self.forms[form], [questions[number] for number in numbers]), strict=True)
            answers |= {number: Answered(names[number], answer, why) for number, (answer, why) in by_number}
        return [answers[number] for number in range(len(questions))]

    def save(self, file: Path) -> None:
        """One compressed file of plain arrays."""
        parts = {form: pack(fitted) for form, fitted in self.forms.items()}
        write_archive(file, self.recipe, parts | {_RESIDUALS: pack(self.residuals)})

    @classmethod
    def load(cls, file: Path) -> KernelModels:
        """The models that `save` wrote. Nothing in the file is executed."""
        archive = Archive.open(file)
        try:
            residuals = unpack(Residuals, archive.part(_RESIDUALS))
        except (KeyError, ValueError) as error:
            raise InputError(f"{file}: not the kernel models that this steptime reads ({error}); fit again") from error
        names = {name: name for name in sorted(archive.parts - {_RESIDUALS})}
        return cls(StoredParts(archive, names, load_form), residuals, archive.recipe)


def with_copies(question: Question) -> list[Question]:
    """The question, its arguments as kernels take them, behind the copies that make them so."""
    call, family = question.call, families().get(family_of(question.call.op))
    if family is None or family.dense is None:
        return [question]
    dense, copied = family.dense(call)
    copies = [
        replace(
            question,
            call=Call(_COPY, (dense.args[place], call.args[place]), written=(1,)),
            warm=question.warm and place in call.written,
        )
        for place in copied
    ]
    return [*copies, replace(question, call=dense)]


def _joined(parts: Sequence[Answered]) -> Answered:
    """The answer to a question behind the copies before it; what cannot be answered of them is left out."""
    last = parts[-1]
    answers = [part.answer for part in parts if part.answer is not None]
    if len(parts) == 1 or last.answer is None:
        return last
    launches = tuple(launch for answer in answers for launch in answer.launches)
    return replace(last, answer=Answer(launches, all(answer.inside for answer in answers)))


def answers_of(form: KernelForm, questions: Sequence[Question]) -> list[tuple[Answer | None, str]]:
    """All at once; where one cannot be answered, one by one."""
    try:
        return [(answer, "") for answer in form.answers(questions)]
    except InputError as error:
        if len(questions) == 1:
            return [(None, str(error))]
    return [answers_of(form, [question])[0] for question in questions]
