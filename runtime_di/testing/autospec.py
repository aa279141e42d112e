"""Mocks of services, created from the types that a Runtime annotates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, get_origin
from unittest.mock import MagicMock

from runtime_di.errors import OverrideError, Problem
from runtime_di.plan import type_hints
from runtime_di.plan.reading import names_of
from runtime_di.runtime import Runtime
from runtime_di.settings import fields


def autospec(create: Callable[..., Any], runtime: type[Runtime], service: Any, attributes: dict[str, Any]) -> Any:
    """Create a mock with exactly the interface of a service's annotated type.

    It includes attributes that only instances have if they are dataclass fields or annotated in the class.

    Args:
        create: ``create_autospec`` of unittest.mock, or of pytest-mock's ``mocker``.
        runtime: a Runtime class.
        service: name, or container attribute.
        attributes: values of attributes, and ``**{"encode.return_value": [1]}`` for results of methods.

    Raises:
        OverrideError: the runtime has no such service, or its annotation is not a class that can be mocked.
    """
    plan = runtime.plan()
    name = names_of(plan.container).get(id(service), str(service))
    if name not in plan.services:
        fix = f"fake one of {', '.join(plan.services)}"
        raise OverrideError(
            "There is nothing to fake.", [Problem(name, f"is not a service of {runtime.__name__}", fix=fix)]
        )
    annotation, module = runtime.service_annotations().get(name, (Any, ""))
    spec = _class(type_hints.resolve(annotation, module)) or _class(type_hints.resolve_importing(annotation, module))
    if spec is None:
        what, fix = f"its annotation {annotation} in {runtime.__name__} is not a class", "write a fake by hand"
        raise OverrideError("The service cannot be mocked.", [Problem(name, what, fix=fix)])
    mock = create(spec, instance=True)
    for name, value in _instance_attributes(create, spec):
        setattr(mock, name, value)
    mock.configure_mock(**attributes)  # last, since create() would replace them by its own methods
    return mock


def _class(annotation: Any) -> type | None:
    """The only class that an annotation accepts besides ``None``."""
    found = [get_origin(member) or member for member in fields.alternatives(annotation)]
    classes = [member for member in found if isinstance(member, type) and member is not type(None)]
    return classes[0] if len(classes) == 1 and len(found) <= 2 and classes[0] is not object else None  # noqa: PLR2004


def _instance_attributes(create: Callable[..., Any], spec: type) -> Iterator[tuple[str, Any]]:
    """Name and mock of every public attribute that the class annotates but does not define."""
    for name, found in type_hints.annotations_of(spec).items():
        if not name.startswith("_") and not hasattr(spec, name):
            kind = _class(type_hints.resolve(*found))
            yield name, create(kind, instance=True) if kind else MagicMock()
