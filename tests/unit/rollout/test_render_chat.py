"""Chats: rendered by the model's own template, grown only at the end, closed exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.chat import FAMILIES, chat_tokenizer
from fakes.rollouts import CharacterTokenizer, LoopUserCode, ScriptedSampler, rollout_request, scripted_settings
from headrace.clock import run_virtual
from headrace.errors import RecipeError
from headrace.rollout.render import ShortTextCache, end_tokens, has_chat_template, read_action, render_observation
from headrace.rollout.roll_out import roll_out
from headrace.runtime.preflight import check_chats
from headrace.types import Action, Completion, EndReason, Observation, PolicyVersion, SamplingParameters, StopReason, Task, Trajectory, VersionSpan

USER = {"role": "user", "content": "Where is the key?"}
words = st.text(alphabet="abc é?\n.", min_size=1, max_size=12).filter(lambda text: text == text.strip())


def say(text: str, role: str = "user") -> Observation:
    return Observation(messages=({"role": role, "content": text},))


def closing_token(family: str) -> int:
    return end_tokens(chat_tokenizer(family))[-1]


def grow(family: str, questions: Sequence[str], answers: Sequence[tuple[str, bool]]) -> list[int]:
    """The context before the last answer, grown as a rollout grows it. An answer: (text, whether the model ended it itself)."""
    tokenizer = ShortTextCache(chat_tokenizer(family))
    context: list[int] = []
    for index, question in enumerate(questions):
        context += render_observation(tokenizer, say(question), first=index == 0, context=context, stop_tokens=end_tokens(chat_tokenizer(family)))
        if index < len(answers):
            text, ended = answers[index]
            context += [*tokenizer.encode(text, add_special_tokens=False), *([closing_token(family)] if ended else [])]
    return context


def rendered_whole(family: str, questions: Sequence[str], answers: Sequence[str]) -> list[int]:
    messages = []
    for index, question in enumerate(questions):
        messages.append({"role": "user", "content": question})
        messages += [{"role": "assistant", "content": answers[index]}] if index < len(answers) else []
    tokenizer = chat_tokenizer(family)
    return list(tokenizer.encode(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True), add_special_tokens=False))


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "instruct"])
@given(questions=st.lists(words, min_size=1, max_size=4), answers=st.lists(st.tuples(words, st.booleans()), min_size=3, max_size=3))
def test_a_grown_chat_is_what_the_template_gives_for_the_whole_conversation(family: str, questions: list[str], answers: list[tuple[str, bool]]) -> None:
    """Whether the model ended its answers itself or was cut off: either way they are closed once."""
    answers = answers[: len(questions) - 1]
    assert grow(family, questions, answers) == rendered_whole(family, questions, [text for text, _ in answers])


def test_a_template_that_puts_a_space_before_the_end_token_loses_nothing_but_that_space() -> None:
    whole = rendered_whole("instruct", ["a", "b"], ["x"])
    tokenizer = chat_tokenizer("instruct")
    (space,) = tokenizer.encode(" ", add_special_tokens=False)
    assert grow("instruct", ["a", "b"], [(" x", True)]) == [
        token for index, token in enumerate(whole) if not (token == space and whole[index + 1 : index + 2] == [closing_token("instruct")])
    ]
    assert grow("instruct", ["a", "b"], [(" x", False)]) == whole


def test_what_was_sampled_stays_also_where_the_template_would_drop_it() -> None:
    """I4: a template that leaves out the thoughts of earlier answers never gets to see them."""
    context = grow("thinking", ["a", "b"], [("<think>deep</think>x", True)])
    assert "<think>deep</think>x<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n" in chat_tokenizer("thinking").decode(context)
    assert context != rendered_whole("thinking", ["a", "b"], ["<think>deep</think>x"])  # the template alone would have


def test_several_new_messages_come_in_one_observation() -> None:
    tokenizer = chat_tokenizer("chatml")
    observation = Observation(messages=({"role": "tool", "content": "42"}, {"role": "user", "content": "So?"}))
    tokens = render_observation(tokenizer, observation, first=False, context=[5], stop_tokens=end_tokens(tokenizer))
    assert tokenizer.decode(tokens) == "<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n"


def test_no_special_token_is_added_beside_those_of_the_template() -> None:
    tokenizer = chat_tokenizer("headers")
    tokens = render_observation(tokenizer, say("hi"), first=True)
    assert tokenizer.decode(tokens) == "<|begin|><|start|>user<|end|>\n\nhi<|eot|><|start|>assistant<|end|>\n\n"


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("chatml", ["<|im_end|>"]),
        ("headers", ["<|eot|>"]),
        ("strict", ["<eos>", "<end_of_turn>"]),
        ("instruct", ["</s>"]),
        ("thinking", ["<|im_end|>"]),
    ],
)
def test_actions_end_at_the_token_that_closes_an_answer(family: str, names: list[str]) -> None:
    tokenizer = chat_tokenizer(family)
    assert tokenizer.convert_ids_to_tokens(list(end_tokens(tokenizer))) == names


def test_an_end_token_that_is_not_the_closing_one_is_followed_by_the_closing_one() -> None:
    tokenizer = chat_tokenizer("strict")
    context = [7, tokenizer.eos_token_id]
    tokens = render_observation(tokenizer, say("b"), first=False, context=context, stop_tokens=end_tokens(tokenizer))
    assert tokenizer.decode(tokens).startswith("<end_of_turn>\n<start_of_turn>user\nb<end_of_turn>")


def test_the_closing_token_is_no_part_of_what_an_environment_sees() -> None:
    tokenizer = chat_tokenizer("strict")
    tokens = (*tokenizer.encode("Up", add_special_tokens=False), closing_token("strict"))
    completion = Completion(
        tokens=tokens,
        logprobs=(-1.0,) * len(tokens),
        version_spans=(VersionSpan(version=PolicyVersion(0, 0), start=0, end=len(tokens)),),
        stop_reason=StopReason.STOP,
    )
    assert read_action(tokenizer, completion, SamplingParameters(stop_tokens=end_tokens(tokenizer))).text == "Up"


@pytest.mark.parametrize("tokenizer", [CharacterTokenizer(), ShortTextCache(CharacterTokenizer())])
@pytest.mark.parametrize("first", [True, False])
def test_without_a_template_messages_are_refused_in_words(tokenizer: CharacterTokenizer | ShortTextCache, first: bool) -> None:
    assert not has_chat_template(tokenizer)
    assert end_tokens(tokenizer) == (0,)
    with pytest.raises(RecipeError, match="no chat template"):
        render_observation(tokenizer, Observation(messages=(USER,)), first=first)


def test_what_the_template_refuses_is_its_own_error() -> None:
    with pytest.raises(Exception, match="roles must alternate"):
        render_observation(chat_tokenizer("strict"), say("again", role="assistant"), first=False, context=[5])


def test_a_template_that_hides_answers_cannot_be_continued() -> None:
    tokenizer = chat_tokenizer("chatml").__class__(tokenizer_object=chat_tokenizer("chatml").backend_tokenizer, eos_token="<|im_end|>", chat_template="x")
    with pytest.raises(RecipeError, match="does not show an assistant's message"):
        render_observation(tokenizer, say("b"), first=False, context=[5])


# --- whole rollouts


class ChatCharacters(CharacterTokenizer):
    """One token a character; 0 closes a message."""

    chat_template = "role:content, 0, newline"

    def apply_chat_template(self, conversation: Sequence[Mapping[str, str]], *, tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
        return "".join(f"{each['role']}:{each['content']}\0\n" for each in conversation) + ("assistant:" if add_generation_prompt else "")


class Dialogue:
    """Asks three times."""

    def __init__(self, observations: Sequence[Any]) -> None:
        self._observations = list(observations)

    async def reset(self, task: Task) -> Any:
        return self._observations.pop(0)

    async def step(self, action: Action) -> Any:
        return (self._observations.pop(0), 0.5, False) if self._observations else (None, 1.0, True)


def run(observations: Sequence[Any] = (), *, task: Task | None = None, tokenizer: Any = None, **sampler: Any) -> tuple[Trajectory, ScriptedSampler]:
    engine = ScriptedSampler(**sampler)
    make_environment = (lambda: Dialogue(observations)) if observations else None

    async def main() -> Trajectory:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(engine.run(lambda: "environment"))
            trajectory = await roll_out(
                rollout_request(task=task, max_action_tokens=4),
                sampler=engine,
                tokenizer=tokenizer or ChatCharacters(),
                user_code=LoopUserCode(make_environment=make_environment),
                settings=scripted_settings(rollout={"max_steps": 8, "max_tokens": 400, "max_action_tokens": 4}).rollout,
            )
            running.cancel()
        return trajectory

    return run_virtual(main()), engine


def text(trajectory: Trajectory) -> str:
    return "".join(map(chr, trajectory.tokens))


def test_a_one_step_task_gives_messages() -> None:
    task = Task(id="t", data={"messages": [{"role": "system", "content": "Be brief."}, USER]})
    trajectory, _ = run(task=task, action_tokens=lambda request: 3)
    assert trajectory.end_reason is EndReason.DONE
    assert text(trajectory)[: trajectory.steps[0].action_start] == "system:Be brief.\0\nuser:Where is the key?\0\nassistant:"


@pytest.mark.parametrize(("num_tokens", "ended"), [(3, True), (9, False)])
def test_an_environment_speaks_in_messages_and_every_answer_is_closed_once(num_tokens: int, ended: bool) -> None:
    """I4: the sampler got what the trajectory holds, and it is the conversation as the template has it."""
    trajectory, sampler = run([say("a"), say("b"), say("c")], action_tokens=lambda request: num_tokens)
    answers = ["".join(map(chr, trajectory.tokens[step.action_start : step.action_end])) for step in trajectory.steps]
    assert all((answer[-1] == "\0") == ended for answer in answers) and len(answers) == 3
    whole = "".join(f"user:{question}\0\nassistant:{answer.rstrip(chr(0))}\0\n" for question, answer in zip("abc", answers, strict=True))
    assert text(trajectory) == whole[: -2 if not ended else -1]
    for request, step in zip(sampler.requests, trajectory.steps, strict=True):
        assert tuple(request.tokens) == trajectory.tokens[: step.action_start]


@pytest.mark.parametrize(
    ("observations", "error"),
    [
        ([say("a"), Observation(text="b")], "began with messages and goes on with a text"),
        ([Observation(text="a"), say("b")], "began with a text and goes on with messages"),
        ([Observation(text="a", messages=(USER,))], "a text and messages: give one of the two"),
        ([Observation(messages=({"role": "user"},))], "lacks a role or a content that is a text"),
        ([Observation(messages=[])], "not a list of messages"),  # type: ignore[arg-type]
        ([Observation(messages="hello")], "not a list of messages"),  # type: ignore[arg-type]
        ([Observation(messages=("hello",))], "not all messages: 'hello' (str)"),  # type: ignore[arg-type]
    ],
)
def test_wrong_messages_end_the_rollout_in_words(observations: list[Any], error: str) -> None:
    trajectory, _ = run(observations)
    assert trajectory.end_reason is EndReason.ENVIRONMENT_ERROR
    assert trajectory.error is not None and error in trajectory.error


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ({}, "has no 'prompt' and no 'messages'"),
        ({"prompt": "a", "messages": [USER]}, "give one of the two"),
        ({"messages": []}, "not a list of messages"),
        ({"messages": [{"role": "user", "content": None}]}, "lacks a role or a content"),
        ({"prompt": 3}, "a 'prompt' that is a int"),
    ],
)
def test_a_one_step_task_with_wrong_messages_says_so(data: dict[str, Any], error: str) -> None:
    trajectory, _ = run(task=Task(id="t", data=data))
    assert trajectory.end_reason is EndReason.ENVIRONMENT_ERROR
    assert trajectory.error is not None and error in trajectory.error and "'t'" in trajectory.error


def test_messages_without_a_template_end_the_rollout_with_what_to_do() -> None:
    trajectory, _ = run([say("a")], tokenizer=CharacterTokenizer())
    assert trajectory.end_reason is EndReason.ENVIRONMENT_ERROR
    assert trajectory.error is not None and "no chat template" in trajectory.error and "Observation(text=...)" in trajectory.error


def test_tasks_with_messages_are_refused_at_start_where_the_model_has_no_template() -> None:
    chats = [Task(id="one", data={"messages": [USER]}), Task(id="two", data={"prompt": "a"})]
    check_chats(chats, True)
    check_chats(chats[1:], False)
    with pytest.raises(RecipeError, match="task 'one' has 'messages', but the model's tokenizer has no chat template"):
        check_chats(chats, False)
