"""Conversations, and for each built-in template the text that must come of them, written out: what
is trained stands between « and »."""

CONVERSATIONS = {
    "two turns and a system prompt": [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4\nor é"},
    ],
    "the assistant begins, the user ends": [
        {"role": "assistant", "content": "Yes? user assistant"},
        {"role": "user", "content": "Yes? user assistant"},
    ],
    "the same text in every turn": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "a"},
    ],
}
EXPECTED = {
    "chatml": (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n«Hello!<|im_end|>»\n<|im_start|>user\n2+2?<|im_end|>\n"
        "<|im_start|>assistant\n«4\nor é<|im_end|>»\n",
        "<|im_start|>assistant\n«Yes? user assistant<|im_end|>»\n"
        "<|im_start|>user\nYes? user assistant<|im_end|>\n",
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n«a<|im_end|>»\n"
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n«a<|im_end|>»\n",
    ),
    "internlm2": (
        "<s><|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n«Hello!<|im_end|>»\n<|im_start|>user\n2+2?<|im_end|>\n"
        "<|im_start|>assistant\n«4\nor é<|im_end|>»\n",
        "<s><|im_start|>assistant\n«Yes? user assistant<|im_end|>»\n"
        "<|im_start|>user\nYes? user assistant<|im_end|>\n",
        "<s><|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n«a<|im_end|>»\n"
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n«a<|im_end|>»\n",
    ),
    "llama3": (
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«Hello!<|eot_id|>»"
        "<|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«4\nor é<|eot_id|>»",
        "<s><|start_header_id|>assistant<|end_header_id|>\n\n«Yes? user assistant<|eot_id|>»"
        "<|start_header_id|>user<|end_header_id|>\n\nYes? user assistant<|eot_id|>",
        "<s><|start_header_id|>user<|end_header_id|>\n\na<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«a<|eot_id|>»"
        "<|start_header_id|>user<|end_header_id|>\n\na<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«a<|eot_id|>»",
    ),
    "zephyr": (
        "<|system|>\nBe kind.</s>\n<|user|>\nHi</s>\n<|assistant|>\n«Hello!</s>»\n"
        "<|user|>\n2+2?</s>\n<|assistant|>\n«4\nor é</s>»\n",
        "<|assistant|>\n«Yes? user assistant</s>»\n<|user|>\nYes? user assistant</s>\n",
        "<|user|>\na</s>\n<|assistant|>\n«a</s>»\n<|user|>\na</s>\n<|assistant|>\n«a</s>»\n",
    ),
}
# Templates as published models have them, without {% generation %}.
FOREIGN = {
    "mistral": (
        "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
        "{{ '[INST] ' + message['content'] + ' [/INST]' }}"
        "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token}}"
        "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}"
        "{% endif %}{% endfor %}",
        "<s>[INST] a [/INST]« a</s>»[INST] a [/INST]« a</s>»",
    ),
    "chatml": (
        "{% for message in messages %}\n    {{'<|im_start|>' + message['role'] + '\n' "
        "+ message['content'] + '<|im_end|>' + '\n'}}\n{% endfor %}\n"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        "    <|im_start|>user\na<|im_end|>\n\n    <|im_start|>assistant\n«a<|im_end|>»\n\n"
        "    <|im_start|>user\na<|im_end|>\n\n    <|im_start|>assistant\n«a<|im_end|>»\n\n",
    ),
    "gemma": (
        "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'assistant') %}"
        "{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}"
        "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}",
        "<s><start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\n«a<end_of_turn>»\n"
        "<start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\n«a<end_of_turn>»\n",
    ),
    "no prompt for the answer": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' "
        "+ message['content'] + '<|im_end|>' + '\n' }}{% endfor %}",
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n«a<|im_end|>»\n"
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n«a<|im_end|>»\n",
    ),
    "end of text after the last turn": (
        "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] "
        "+ '<|end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}"
        "{% else %}{{ eos_token }}{% endif %}",
        "<|user|>\na<|end|>\n<|assistant|>\n«a<|end|>»\n"
        "<|user|>\na<|end|>\n<|assistant|>\n«a<|end|>»\n</s>",
    ),
}
CONTROL = (
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|end|>",
    "<|user|>",
    "<|assistant|>",
)


def marked(text: str, spans: tuple[tuple[int, int], ...]) -> str:
    """A text with its spans between « and »."""
    for first, end in reversed(spans):
        text = f"{text[:first]}«{text[first:end]}»{text[end:]}"
    return text
