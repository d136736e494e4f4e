"""Values by name: those of this package, registered ones, and those of installed packages, made here as dist-info."""

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from tessera.runtime.plugins import PluginError, Registry
from tests.installed import write_metadata


class Own:
    pass


class Other:
    pass


@pytest.fixture
def registry() -> Registry[type]:
    return Registry(
        "shape",
        {"own": Own},
        group="tests.shapes",
        expected="a class",
        valid=lambda value: isinstance(value, type),
    )


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that installs a package with one module and the given entry points of the group."""

    def installed(package: str, source: str, **points: str) -> None:
        folder = tmp_path / package
        write_metadata(folder, package, {"tests.shapes": points})
        (folder / f"module_{package}.py").write_text(source)
        monkeypatch.syspath_prepend(folder)

    return installed


def test_registered_values_are_found_and_a_name_is_taken_once(registry: Registry[type]) -> None:
    assert registry.register("other", Other) is Other
    assert registry.register("other", Other) is Other  # a module that is imported again

    @registry.register("third")
    class Third:
        pass

    assert registry["third"] is Third
    assert registry.names() == list(registry) == ["own", "other", "third"]
    with pytest.raises(PluginError, match="There is a shape 'own' already"):
        registry.register("own", Other)
    with pytest.raises(PluginError, match="The shape 'number' must be a class, not 3"):
        registry.register("number", 3)
    assert registry["own"] is Own


def test_an_installed_value_is_imported_at_its_first_use(
    registry: Registry[type], install: Callable[..., None]
) -> None:
    install("square", "class Square: pass", square="module_square:Square", second="gone:Gone")
    assert registry.names() == ["own", "second", "square"]
    assert "square" in registry
    assert list(registry) == ["own"]
    assert "module_square" not in sys.modules
    assert registry["square"].__name__ == "Square"
    assert list(registry) == ["own", "square"]
    with pytest.raises(
        PluginError, match=r"The shape 'second' of the installed package square cannot be imported from gone:Gone: Mod"
    ):
        registry["second"]
    assert list(registry.working()) == ["own", "square"]  # without the broken one
    with pytest.raises(PluginError, match=r"unknown shape 'third' \(known: own, second, square\). If another package"):
        registry["third"]


def test_an_installed_value_of_another_kind_is_refused(registry: Registry[type], install: Callable[..., None]) -> None:
    install("number", "VALUE = 3", number="module_number:VALUE")
    with pytest.raises(PluginError, match="installed package number must be a class, but module_number:VAL"):
        registry["number"]


def test_a_name_of_an_installed_package_is_taken(registry: Registry[type], install: Callable[..., None]) -> None:
    install("round", "class Round: pass", circle="module_round:Round")
    with pytest.raises(PluginError, match="There is a shape 'circle' already in the installed package round"):
        registry.register("circle", Other)
    module = import_module("module_round")
    assert registry.register("circle", module.Round) is registry["circle"]  # as the module itself may do


def test_a_name_of_two_packages_is_an_error(registry: Registry[type], install: Callable[..., None]) -> None:
    install("first", "", same="module_first:Value")
    install("second", "", same="module_second:Value")
    with pytest.raises(PluginError, match="provides a shape 'same', and so does the package"):
        registry.names()


def test_a_name_of_our_own_is_an_error(registry: Registry[type], install: Callable[..., None]) -> None:
    install("first", "", own="module_first:Value")
    with pytest.raises(PluginError, match="package first provides a shape 'own', and so does Tessera"):
        registry.names()


def test_a_name_from_a_file_imports_nothing(registry: Registry[type]) -> None:
    for name in ("antigravity", "antigravity:fly", "tests.runtime.test_plugins:Other"):
        assert name not in registry
        with pytest.raises(PluginError, match="unknown shape"):
            registry[name]
    assert "antigravity" not in sys.modules
