"""Tools for work: calendar, messages, money, files, shops, machines. A table; tool.py reads it."""

from __future__ import annotations

from training.problems.names import CITIES, COLOURS, ROOMS
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

PERSON = text(first_name)
CODE = text(code)
CURRENCIES = ("USD", "EUR", "GBP", "JPY", "INR", "CHF", "SEK", "BRL")
LANGUAGES = from_list(
    ["French", "German", "Spanish", "Italian", "Polish", "Hindi", "Swahili", "Korean", "Greek"]
)
TOPICS = place(
    ["whales", "volcanoes", "chess", "solar power", "bridges", "tea", "glaciers", "violins", "bees"]
)
MESSAGES = from_list(
    [
        "I am late",
        "see you soon",
        "happy birthday",
        "the keys are here",
        "call me back",
        "dinner is ready",
        "well done",
    ]
)
TITLES = from_list(
    ["dentist", "team meeting", "lunch", "yoga", "review", "interview", "concert", "phone call"]
)

OFFICE_TOOLS = (
    tool(
        "send_message",
        "Send a text message to a person.",
        {"recipient": PERSON, "message": text(MESSAGES)},
        (
            'Send {recipient} the message "{message}".',
            "Tell {recipient}: {message}",
            'Text "{message}" to {recipient}.',
        ),
        {"time": clock_time},
        "Your message to {recipient} was sent at {time}.",
    ),
    tool(
        "send_email",
        "Send an email.",
        {"to": PERSON, "subject": text(TITLES), "urgent": optional(switch())},
        (
            "Send an email about the {subject} to {to}.",
            "Email {to} about the {subject}.",
            ("Send {to} an urgent email about the {subject}.", {"urgent": True}),
        ),
        {"mail_id": code},
        "The email {mail_id} to {to} is on its way.",
    ),
    tool(
        "create_event",
        "Put an event into the calendar.",
        {"title": text(TITLES), "date": text(date, "YYYY-MM-DD"), "time": text(clock_time)},
        (
            "Put {title} on {date} at {time} into my calendar.",
            "Add an event: {title}, {date}, {time}.",
            "Schedule {title} for {date} at {time}.",
        ),
        {"event_id": code},
        "{title} is in your calendar as {event_id}.",
    ),
    tool(
        "list_events",
        "List the events of a day.",
        {"date": text(date, "YYYY-MM-DD")},
        ("What is in my calendar on {date}?", "Do I have plans on {date}?"),
        {"event": TITLES, "time": clock_time},
        "On {date} you have {event} at {time}.",
    ),
    tool(
        "invite",
        "Invite people to an event.",
        {"event_id": CODE, "people": several(first_name)},
        ("Invite {people} to event {event_id}.", "Please ask {people} to join event {event_id}."),
        {"accepted": integer(0, 9)},
        "The invitations to {event_id} are out; {accepted} have accepted.",
    ),
    tool(
        "convert_currency",
        "Convert an amount of money into another currency.",
        {"amount": decimal(1, 900), "source": choice(*CURRENCIES), "target": choice(*CURRENCIES)},
        (
            "Convert {amount} {source} to {target}.",
            "How much is {amount} {source} in {target}?",
        ),
        {"result": integer(2, 9000)},
        "{amount} {source} are {result} {target}.",
    ),
    tool(
        "get_stock_price",
        "Get the price of a stock.",
        {
            "symbol": text(
                from_list(["ABX", "QRT", "MNO", "ZLK", "TVW", "PEX", "KLU", "HYD", "JAR"])
            )
        },
        ("What is the stock price of {symbol}?", "How is {symbol} doing on the market?"),
        {"price": integer(2, 900)},
        "{symbol} is at {price} dollars.",
    ),
    tool(
        "transfer_money",
        "Send money to an account.",
        {"account": CODE, "amount": decimal(1, 500), "note": optional(text(TITLES))},
        (
            "Transfer {amount} dollars to account {account}.",
            "Send {amount} dollars to {account} with the note {note}.",
        ),
        {"balance": integer(10, 9000)},
        "Done. Your balance is {balance} dollars.",
    ),
    tool(
        "web_search",
        "Search the web.",
        {"query": text(TOPICS), "max_results": optional(whole(2, 20))},
        (
            "Search the web for {query}.",
            "Look up {query} online.",
            "Find {max_results} pages about {query}.",
        ),
        {"title": TOPICS, "hits": integer(3, 900)},
        "I found {hits} pages; the first is about {title}.",
    ),
    tool(
        "translate",
        "Translate a text into another language.",
        {"text": text(MESSAGES), "language": text(LANGUAGES)},
        ('Translate "{text}" into {language}.', 'How do I say "{text}" in {language}?'),
        {"translation": place(["merula"])},
        'In {language} it is "{translation}".',
    ),
    tool(
        "create_ticket",
        "Open a support ticket.",
        {
            "title": text(place(["broken screen", "no network"])),
            "priority": choice("low", "medium", "high"),
        },
        (
            "Open a {priority} priority ticket: {title}.",
            "Create a ticket called {title} with {priority} priority.",
        ),
        {"ticket": code},
        "Ticket {ticket} is open.",
    ),
    tool(
        "close_ticket",
        "Close a support ticket.",
        {"ticket": CODE},
        ("Close ticket {ticket}.", "The problem of ticket {ticket} is solved, close it."),
        {"open_tickets": integer(0, 60)},
        "Ticket {ticket} is closed; {open_tickets} are still open.",
    ),
    tool(
        "read_file",
        "Read a file.",
        {"path": text(lambda rng: f"{code(rng)}.txt"), "lines": optional(whole(1, 90))},
        (
            "What is in the file {path}?",
            "Show me the first {lines} lines of {path}.",
            "Open {path}.",
        ),
        {"content": TOPICS},
        "The file {path} says: {content}.",
    ),
    tool(
        "delete_file",
        "Delete a file.",
        {"path": text(lambda rng: f"{code(rng)}.log"), "force": optional(switch())},
        ("Delete {path}.", "Remove the file {path}.", ("Delete {path} by force.", {"force": True})),
        {"freed_kb": integer(1, 900)},
        "{path} is gone; that freed {freed_kb} kilobytes.",
    ),
    tool(
        "run_report",
        "Make a sales report for a region.",
        {
            "region": text(place(CITIES)),
            "quarter": whole(1, 4),
            "format": optional(choice("pdf", "csv", "html")),
        },
        (
            "Make a sales report for {region}, quarter {quarter}.",
            "I need the report of quarter {quarter} for {region} as {format}.",
        ),
        {"report": code},
        "The report {report} for {region} is ready.",
    ),
    tool(
        "check_stock",
        "Say how many pieces of a product are in store.",
        {"product": CODE},
        ("How many pieces of {product} do we have?", "Check the stock of product {product}."),
        {"pieces": integer(0, 900)},
        "There are {pieces} pieces of {product} in store.",
    ),
    tool(
        "create_order",
        "Order a product for a customer.",
        {"product": CODE, "quantity": whole(1, 99), "colour": optional(text(from_list(COLOURS)))},
        (
            "Order {quantity} pieces of {product}.",
            "Buy {quantity} of {product} in {colour}.",
        ),
        {"order_id": code, "total": integer(5, 900)},
        "Order {order_id} is placed and costs {total} dollars.",
    ),
    tool(
        "cancel_order",
        "Cancel an order.",
        {"order_id": CODE},
        ("Cancel my order {order_id}.", "I do not want order {order_id} any more."),
        {"refund": integer(5, 900)},
        "Order {order_id} is cancelled; you get {refund} dollars back.",
    ),
    tool(
        "book_room",
        "Book a meeting room.",
        {"room": text(from_list(ROOMS)), "date": text(date), "people": whole(2, 40)},
        (
            "Book the {room} on {date} for {people} people.",
            "We are {people} people and need the {room} on {date}.",
        ),
        {"booking": code},
        "The {room} is booked under {booking}.",
    ),
    tool(
        "find_contact",
        "Find the phone number of a person.",
        {"name": PERSON},
        ("What is the phone number of {name}?", "How can I call {name}?"),
        {"phone": integer(100000, 999999)},
        "The number of {name} is {phone}.",
    ),
    tool(
        "restart_server",
        "Restart a server.",
        {"server": CODE, "wait_seconds": optional(whole(1, 60))},
        ("Restart server {server}.", "Restart the server {server} in {wait_seconds} seconds."),
        {"uptime": integer(1, 90)},
        "Server {server} is up again after {uptime} seconds.",
    ),
    tool(
        "average",
        "Compute the average of numbers.",
        {"numbers": several(integer(2, 900), "integer")},
        ("What is the average of {numbers}?", "Give me the mean of {numbers}."),
        {"average": integer(2, 900)},
        "The average is {average}.",
    ),
)
