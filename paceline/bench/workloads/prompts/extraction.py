"""Facts out of a text, as JSON."""

from paceline.bench.workloads.prompts import Template

TEMPLATES = [
    Template(
        "Extract the fields name, role, city and start_date from each sentence and answer with a JSON list "
        "only.\n\n{first} joined the {team} team in {city} as {role} on 3 March 2021. A month later, on 5 April "
        "2021, {second} started there as a junior {role}. {third}, who works from Oslo, became their {lead} on 1 "
        "June 2022.",
        {
            "first": ["Marta Lind", "Jonas Weber"],
            "second": ["Priya Nair", "Tom Okafor"],
            "third": ["Elena Sokolova"],
            "team": ["billing", "search"],
            "city": ["Turin", "Porto", "Ghent"],
            "role": ["data engineer", "product designer"],
            "lead": ["manager"],
        },
    ),
    Template(
        "Turn this order into JSON with the keys customer, items (name, quantity, price) and total. Answer with "
        "JSON only.\n\n{customer} ordered {n} boxes of {a} at {price} euros each, two jars of {b} at 4.50 euros "
        "each and one crate of {c} at 12 euros. Delivery is free.",
        {
            "customer": ["Mrs. Haddad", "The Corner Café", "Mr. Lindqvist"],
            "n": ["three", "five"],
            "a": ["green tea", "pasta"],
            "price": ["6.20", "2.80"],
            "b": ["honey", "mustard"],
            "c": ["oranges"],
        },
    ),
]
