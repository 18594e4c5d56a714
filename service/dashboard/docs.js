// The API for people, drawn from its own description.

const main = document.getElementById("operations");

function element(name, text = "", className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

function resolve(document_, schema) {
  const name = schema?.$ref?.split("/").pop();
  return name ? document_.components.schemas[name] : schema;
}

function bodies(document_, operation) {
  const content = operation.requestBody?.content?.["application/json"];
  const answers = Object.entries(operation.responses).map(([status, answer]) =>
    [`answer ${status}`, answer.content?.["application/json"]?.schema]);
  return [["body", content?.schema], ...answers].filter(([, schema]) => schema?.$ref)
    .map(([label, schema]) => [label, resolve(document_, schema)]);
}

function operationCard(document_, path, verb, operation) {
  const card = element("details");
  const summary = element("summary");
  summary.append(element("span", verb.toUpperCase(), "verb"), element("code", path), ` ${operation.description ?? ""}`);
  card.append(summary);
  for (const parameter of operation.parameters ?? []) {
    const line = element("p");
    line.append(element("code", parameter.name), ` in ${parameter.in}. ${parameter.description ?? ""}`);
    card.append(line);
  }
  for (const [label, schema] of bodies(document_, operation)) {
    const block = element("pre");
    block.append(element("code", JSON.stringify(schema.properties ?? schema, null, 1)));
    card.append(element("p", label), block);
  }
  return card;
}

async function show() {
  const answer = await fetch("/v1/openapi.json");
  if (!answer.ok) throw new Error(`the service answered ${answer.status}`);
  const description = await answer.json();
  for (const [path, verbs] of Object.entries(description.paths)) {
    for (const [verb, operation] of Object.entries(verbs)) {
      main.append(operationCard(description, path, verb, operation));
    }
  }
}

await show().catch((error) => main.append(element("p", `The description of the API could not be read: ${error.message}. Load this page again.`)));
