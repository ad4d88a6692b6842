"""Open section: a section of a configuration file to which powers add keys: they come in by a door,
when a file names them, and stand beside the section's own."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

from pydantic import (
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from precompute.jobs.config.section import Section, Several
from precompute.store.doors import Door
from precompute.store.errors import ConfigError
from precompute.store.feature_view import FeatureView


class Mistake(NamedTuple):
    """What a power finds wrong: the key that is to be changed, and what is wrong with it."""

    key: Sequence[int | str]
    what: str


class Keys(Section):
    """What a power adds to a section: its fields are keys there. Each field's name, with the
    sections that it stands in, is a name of the door by which the class comes in."""

    def check(self, names: Collection[str]) -> Mistake | None:
        """What is wrong beside the project's views, whose ``names`` these are; the key is one of
        the file that this was read from."""
        return None

    def mistake(
        self, view: FeatureView, names: Collection[str], views: Mapping[str, FeatureView]
    ) -> Mistake | None:
        """What is wrong for one view beside the project's others: ``names`` are those of all, and
        ``views`` the ones whose file is right. The key is one of that view's file; of a view's own
        keys, ``view`` is the one that has them."""
        return None

    def preflight(self, view: FeatureView | None) -> None:
        """Look whether what is needed is here, before a run computes ``view``, or, None, before a
        server starts.

        Raises:
            ConfigError: it is not.
        """

    def wants(self, view: str) -> bool:
        """Whether a view of this name is to have what a hook of the same name derives."""
        return True

    def spec(self) -> Mapping[str, Any]:
        """Name of the door → plain JSON: of a view's keys, what is kept in each snapshot's record
        (:attr:`precompute.store.feature_view.FeatureView.powers`); of a server's, what its
        processes are given."""
        return {}

    def columns(self) -> Collection[str]:
        """Columns that answers have because of it: no feature or key column may be called so."""
        return ()

    def misses_by(self) -> str | None:
        """Of a view's keys, the one of :meth:`spec` that has another model compute the view's
        misses, if one does: :meth:`substitute` opens it then."""
        return None

    @classmethod
    def substitute(cls, view: FeatureView, folder: Path) -> Any:
        """What computes a view's misses in its model's stead, as a
        :class:`precompute.jobs.run.rows.substitute.OpenSubstitute`.

        Args:
            view: its record names the key.
            folder: of the project, absolute.

        Raises:
            ConfigError: there is none, or it is not of this view.
        """
        raise NotImplementedError


class OpenSection(Section):
    """A section with the keys of powers besides.

    A power is opened where a file has a key of it, and one that is not here is told in a line that
    says so: what was asked for is never passed over.
    """

    door: ClassVar[Door[type[Keys]]]
    """Of its keys."""
    within: ClassVar[str] = ""
    """The sections that it stands in, as ``serve``, by which names of the door begin."""
    _powers: tuple[Keys, ...] = PrivateAttr(())

    @property
    def powers(self) -> tuple[Keys, ...]:
        """The keys of powers that the file has, in its order."""
        return self._powers

    @classmethod
    def parts(cls) -> tuple[type[Section], ...]:
        """Itself, and the keys of every power that is here.

        Raises:
            ConfigError: another package's cannot be loaded.
        """
        here = (kind for name, kind in cls.door.all() if name.rpartition(".")[0] == cls.within)
        return (cls, *dict.fromkeys(here))

    @model_validator(mode="wrap")
    @classmethod
    def _open(
        cls, data: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo
    ) -> Self:
        given = data if isinstance(data, Mapping) else {}
        names = {
            key: f"{cls.within}.{key}".lstrip(".")
            for key in given
            if isinstance(key, str) and key not in cls.model_fields
        }
        names = {key: name for key, name in names.items() if cls.door.has(name)}
        if not names:
            return handler(data)
        of_powers, wrong = dict[type[Keys], dict[str, Any]](), list[Any]()
        for key, name in names.items():
            try:
                of_powers.setdefault(cls.door.open(name), {})[key] = given[key]
            except ConfigError as exc:
                # without the value, which says nothing of this
                wrong.append({"type": "value_error", "loc": (key,), "msg": str(exc), "input": {}})
        section, powers = None, list[Keys]()
        try:
            section = handler({key: given[key] for key in given if key not in names})
        except ValidationError as exc:
            wrong += exc.errors()
        for kind, of_power in of_powers.items():
            try:
                powers.append(kind.model_validate(of_power, context=info.context))
            except ValidationError as exc:
                wrong += exc.errors()
        if section is None or wrong:
            raise Several(wrong)
        section._powers = tuple(powers)
        return section
