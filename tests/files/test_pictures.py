"""What every picture does with text."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from hpcsgd.files.pictures import save


def test_a_users_name_is_no_formula_and_powers_of_ten_are(tmp_path: Path) -> None:
    """matplotlib raises an exception for the formula in "$_$"."""
    figure = Figure()
    axes = figure.add_subplot()
    [line] = axes.plot([1, 1000], [1, 2], label="$_$")
    axes.set(xscale="log", title="$^$", xlabel="$_$")
    legend = axes.legend(handles=[line])
    save(figure, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 0
    assert not any(text.get_parse_math() for text in (*legend.get_texts(), axes.title, axes.xaxis.label))
    labels = [text for text in axes.get_xticklabels() if text.get_text()]
    assert any("10^{3}" in text.get_text() for text in labels)
    assert all(text.get_parse_math() for text in labels)
