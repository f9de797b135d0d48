"""The public APIs, one file each: what a request of it may say, what each leg is sent, and how its answers speak.

    request      a body that may be served; what bounds it
    fields       types of fields and how to say that one is wrong
    dialect      what the router must know of an API, and nothing else of the router knows
    completions, chat, responses, messages
                 the dialects; `openai` is what the first three share
    dialects     the table of them, and `parse`
    questions    what any worker answers at once
    endpoints    the table of all paths that take a body
    schema       the same knowledge as an OpenAPI document

Holds for vLLM 0.32. Knows nothing of workers, connections or receipts.
"""
