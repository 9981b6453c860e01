"""Tools of everyday life: weather, home, timers, travel, food, music. A table; tool.py reads it."""

from __future__ import annotations

from training.problems.names import CITIES, COLOURS, FOODS, ROOMS, WEEKDAYS
from training.problems.tool import (
    choice,
    clock_time,
    code,
    date,
    decimal,
    first_name,
    from_list,
    integer,
    optional,
    place,
    several,
    switch,
    text,
    tool,
    whole,
)

CITY = text(place(CITIES))
PERSON = text(first_name)
FOOD = from_list(FOODS)
SKIES = from_list(["sunny", "cloudy", "rainy", "foggy", "windy", "snowy", "clear"])

DAILY_TOOLS = (
    tool(
        "get_weather",
        "Get the current weather in a city.",
        {"city": CITY, "unit": optional(choice("celsius", "fahrenheit"))},
        (
            "What is the weather in {city}?",
            "How is the weather in {city} right now?",
            "Tell me the weather in {city} in {unit}.",
            "Do I need a coat in {city} today?",
        ),
        {"temperature": integer(-9, 38), "sky": SKIES},
        "It is {temperature} degrees and {sky} in {city}.",
    ),
    tool(
        "get_forecast",
        "Get the weather forecast for the coming days.",
        {"city": CITY, "days": whole(2, 10)},
        (
            "Give me the forecast for {city} for the next {days} days.",
            "What will the weather be like in {city} over {days} days?",
        ),
        {"outlook": SKIES},
        "The next {days} days in {city} will be {outlook}.",
    ),
    tool(
        "set_timer",
        "Start a countdown timer.",
        {"minutes": whole(1, 90), "label": optional(text(FOOD))},
        (
            "Set a timer for {minutes} minutes.",
            "Start a {minutes} minute timer.",
            "Set a timer for {minutes} minutes and call it {label}.",
        ),
        {"timer_id": code},
        "The timer {timer_id} runs for {minutes} minutes.",
    ),
    tool(
        "set_alarm",
        "Set an alarm for a time of day.",
        {"time": text(clock_time, "HH:MM"), "days": optional(several(from_list(WEEKDAYS)))},
        (
            "Wake me up at {time}.",
            "Set an alarm for {time}.",
            "Set an alarm for {time} on {days}.",
        ),
        {"alarm_id": code},
        "The alarm {alarm_id} is set for {time}.",
    ),
    tool(
        "set_light",
        "Switch the light of a room on or off.",
        {
            "room": text(from_list(ROOMS)),
            "on": switch(),
            "colour": optional(text(from_list(COLOURS))),
        },
        (
            ("Turn on the light in the {room}.", {"on": True}),
            ("Switch the {room} light off.", {"on": False}),
            ("Make the {room} light {colour}.", {"on": True}),
            ("It is too dark in the {room}. Light, please.", {"on": True}),
        ),
        {"status": from_list(["ok", "done"])},
        "Done: the light in the {room} is changed.",
    ),
    tool(
        "set_thermostat",
        "Set the temperature of a room.",
        {"room": text(from_list(ROOMS)), "degrees": decimal(15, 26)},
        ("Set the {room} to {degrees} degrees.", "Heat the {room} to {degrees} degrees."),
        {"now": integer(12, 24)},
        "The {room} goes to {degrees} degrees; now it is at {now}.",
    ),
    tool(
        "lock_door",
        "Lock or unlock a door.",
        {
            "door": text(from_list(["front", "back", "garage", "cellar", "side"])),
            "locked": switch(),
        },
        (
            ("Lock the {door} door.", {"locked": True}),
            ("Please unlock the {door} door.", {"locked": False}),
        ),
        {"battery": integer(5, 100)},
        "The {door} door is set; its battery is at {battery} percent.",
    ),
    tool(
        "play_music",
        "Play a song or an artist.",
        {
            "title": text(place(["Moonlight", "Sunrise", "Ocean", "Winter"])),
            "volume": optional(whole(1, 100)),
        },
        ("Play {title}.", "I want to hear {title}.", "Play {title} at volume {volume}."),
        {"seconds": integer(60, 400)},
        "Now playing {title}, {seconds} seconds long.",
    ),
    tool(
        "find_recipe",
        "Find a recipe that uses given ingredients.",
        {"ingredients": several(FOOD), "vegetarian": optional(switch())},
        (
            "What can I cook with {ingredients}?",
            "Find a recipe with {ingredients}.",
            ("Find a vegetarian recipe with {ingredients}.", {"vegetarian": True}),
        ),
        {"recipe": place(["garden stew", "golden pie", "quick bowl"]), "minutes": integer(10, 90)},
        "You can make {recipe}; it takes {minutes} minutes.",
    ),
    tool(
        "order_food",
        "Order a dish from a restaurant.",
        {"dish": text(FOOD), "quantity": whole(1, 9), "address": optional(text(place(CITIES)))},
        (
            "Order {quantity} portions of {dish}.",
            "I would like {quantity} times {dish}, to {address}.",
        ),
        {"order_id": code, "minutes": integer(10, 70)},
        "Order {order_id} with {quantity} x {dish} comes in {minutes} minutes.",
    ),
    tool(
        "book_table",
        "Book a table in a restaurant.",
        {
            "restaurant": text(place(["Luna", "Oasis", "Harbor"])),
            "people": whole(2, 12),
            "time": text(clock_time),
        },
        (
            "Book a table for {people} at {restaurant} at {time}.",
            "Reserve a table at {restaurant} for {people} people at {time}.",
        ),
        {"booking": code},
        "Your table at {restaurant} is booked under {booking}.",
    ),
    tool(
        "search_flights",
        "Search flights between two cities on a day.",
        {"origin": CITY, "destination": CITY, "date": text(date, "YYYY-MM-DD")},
        (
            "Find flights from {origin} to {destination} on {date}.",
            "I want to fly from {origin} to {destination} on {date}.",
        ),
        {"flight": code, "price": integer(49, 900)},
        "Flight {flight} from {origin} to {destination} costs {price} dollars.",
    ),
    tool(
        "get_route",
        "Get directions between two places.",
        {"start": CITY, "end": CITY, "mode": optional(choice("car", "bus", "bike", "train"))},
        (
            "How do I get from {start} to {end}?",
            "Show me the way from {start} to {end} by {mode}.",
        ),
        {"kilometers": integer(3, 900)},
        "From {start} to {end} it is {kilometers} kilometers.",
    ),
    tool(
        "call_taxi",
        "Order a taxi to an address.",
        {"address": text(place(CITIES)), "passengers": whole(1, 6)},
        (
            "Get me a taxi to {address} for {passengers} people.",
            "Call a cab for {passengers} to {address}.",
        ),
        {"plate": code, "minutes": integer(2, 30)},
        "The taxi {plate} is there in {minutes} minutes.",
    ),
    tool(
        "track_package",
        "Say where a package is.",
        {"tracking_number": text(code)},
        ("Where is my package {tracking_number}?", "Track the parcel {tracking_number}."),
        {"place": place(CITIES), "days": integer(1, 9)},
        "Package {tracking_number} is in {place} and needs {days} more days.",
    ),
    tool(
        "add_to_shopping_list",
        "Add items to the shopping list.",
        {"items": several(FOOD)},
        (
            "Put {items} on my shopping list.",
            "Add {items} to the shopping list.",
            "We need {items}, note it.",
        ),
        {"count": integer(2, 40)},
        "Your shopping list has {count} entries now.",
    ),
    tool(
        "log_run",
        "Save a run in the training diary.",
        {"kilometers": decimal(1, 30), "minutes": whole(5, 200)},
        (
            "I ran {kilometers} kilometers in {minutes} minutes, save it.",
            "Log a run: {kilometers} km, {minutes} minutes.",
        ),
        {"total": integer(20, 900)},
        "Saved. You ran {total} kilometers this year.",
    ),
    tool(
        "water_plants",
        "Water the plants of a zone.",
        {"zone": whole(1, 12), "liters": decimal(1, 20)},
        (
            "Water zone {zone} with {liters} liters.",
            "Give {liters} liters of water to zone {zone}.",
        ),
        {"moisture": integer(10, 90)},
        "Zone {zone} is watered; moisture is {moisture} percent.",
    ),
    tool(
        "get_movie_times",
        "List the times of a film in a city.",
        {"film": text(place(["Starfall", "Riverside", "Echoes"])), "city": CITY},
        ("When does {film} run in {city}?", "Show times for {film} in {city}."),
        {"time": clock_time},
        "{film} runs at {time} in {city}.",
    ),
    tool(
        "feed_pet",
        "Release food for a pet.",
        {"pet": PERSON, "grams": whole(10, 300)},
        ("Feed {pet} {grams} grams.", "Give {grams} grams of food to {pet}."),
        {"left": integer(100, 5000)},
        "{pet} is fed; {left} grams of food are left.",
    ),
    tool(
        "take_photo",
        "Take photos with a camera.",
        {"camera": text(code), "count": whole(1, 20), "flash": optional(switch())},
        (
            "Take {count} photos with camera {camera}.",
            ("Take {count} photos with camera {camera} and use the flash.", {"flash": True}),
        ),
        {"album": code},
        "Camera {camera} saved the photos in album {album}.",
    ),
)
