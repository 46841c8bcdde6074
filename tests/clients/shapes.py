"""What the clients ask for. Every text has a limit and nothing may be added: a small model would write on and on."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

QUESTION = "A train leaves Oslo for Bergen at noon with 120 passengers. Describe the trip."


class Trip(BaseModel):
    """A trip from one place to another."""

    model_config = ConfigDict(extra="forbid")

    start: str = Field(max_length=12)
    destination: str = Field(max_length=12)
    passengers: int = Field(ge=0, le=999)
    by: Literal["train", "bus", "boat"]


class Weather(BaseModel):
    """Tells the weather in a city."""

    model_config = ConfigDict(extra="forbid")

    city: str = Field(max_length=12)
    unit: Literal["celsius", "fahrenheit"]
