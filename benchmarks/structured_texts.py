"""Our own texts to extract from, and the schemas to extract with."""

from typing import Any

ORDERS = (
    ("Marta Lindqvist", "marta.lindqvist@example.com", "Harbour Street 14", "Gothenburg",
     (("canvas backpack", 2, 59.5), ("steel water bottle", 4, 18.0), ("wool blanket", 1, 84.25)), "invoice"),
    ("Oluwaseun Adeyemi", "o.adeyemi@example.org", "Palm Avenue 203", "Ibadan",
     (("solar lantern", 6, 24.0), ("folding chair", 12, 15.75)), "card"),
    ("Priya Raghunathan", "priya.r@example.net", "Lake View Road 7", "Chennai",
     (("mechanical keyboard", 1, 129.0), ("monitor arm", 2, 64.5), ("desk lamp", 2, 32.0)), "transfer"),
    ("Tomasz Wierzbicki", "t.wierzbicki@example.com", "Mill Lane 88", "Krakow",
     (("climbing rope", 1, 142.5), ("carabiner set", 3, 27.0), ("chalk bag", 2, 14.5)), "card"),
)  # fmt: skip

_LINE = {
    "type": "object",
    "properties": {
        "product": {"type": "string", "maxLength": 40},
        "quantity": {"type": "integer", "minimum": 1, "maximum": 999},
        "unit_price": {"type": "number", "minimum": 0, "maximum": 9999},
    },
    "required": ["product", "quantity", "unit_price"],
    "additionalProperties": False,
}
EXTRACTION_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string", "maxLength": 40},
        "customer_email": {"type": "string", "maxLength": 40},
        "delivery_address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 40},
                "city": {"type": "string", "maxLength": 40},
            },
            "required": ["street", "city"],
            "additionalProperties": False,
        },
        "order_lines": {"type": "array", "items": _LINE, "minItems": 2, "maxItems": 4},
        "payment_method": {"enum": ["card", "invoice", "transfer"]},
    },
    "required": ["customer_name", "customer_email", "delivery_address", "order_lines", "payment_method"],
    "additionalProperties": False,
}
# An answer that goes on for as long as it is asked to, in which most tokens are free.
LONG_SCHEMA: dict[str, Any] = {
    "type": "array",
    "items": {"type": "string", "minLength": 20, "maxLength": 200},
    "minItems": 100,
}


def extraction_prompts() -> list[str]:
    return [_prompt(*order) for order in ORDERS]


def _prompt(name: str, email: str, street: str, city: str, lines: Any, payment: str) -> str:
    wanted = "; ".join(f"{quantity} of the {product} at {price:.2f} each" for product, quantity, price in lines)
    return (
        f"Hello, my name is {name} and you can reach me at {email}. I would like to order {wanted}. "
        f"Please send everything to {street} in {city}. I pay by {payment}.\n\n"
        "Extract the order from this letter as JSON with customer_name, customer_email, delivery_address (street, "
        "city), order_lines (product, quantity, unit_price) and payment_method."
    )
