// The list of jobs. Talks to /v1 like any other client; every text goes in as text, never as markup.

const ICONS = {
  queued: "…", planning: "◔", running: "▶", verifying: "◕", cancelling: "◌",
  succeeded: "✓", failed: "✗", cancelled: "–",
};
const POLL_MS = 1000;
const LIVE = new Set(["queued", "planning", "running", "verifying"]);

const byId = (id) => document.getElementById(id);
const rows = new Map();
let pages = 1;

async function call(path, method = "GET") {
  const token = sessionStorage.getItem("token");
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const response = await fetch(path, { method, headers });
  const body = await response.json();
  if (response.status === 401) byId("login").hidden = false;
  if (!response.ok && path !== "/readyz") throw new Error(body.detail);
  return body;
}

function size(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (bytes >= 1000 && unit < units.length - 1) { bytes /= 1000; unit += 1; }
  return `${bytes.toFixed(unit && bytes < 100 ? 1 : 0)} ${units[unit]}`;
}

function duration(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

function amount(progress) {
  if (!progress) return "";
  let text = `${size(progress.bytes_done)} of ${size(progress.bytes_total)}`;
  if (progress.bytes_per_s && progress.eta_s !== null) {
    text += ` · ${size(progress.bytes_per_s)}/s · ${duration(progress.eta_s)} left`;
  }
  return text;
}

function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function newRow(id) {
  const row = byId("row").content.firstElementChild.cloneNode(true);
  row.querySelector(".act").addEventListener("click", async (event) => {
    event.target.disabled = true;
    try { await call(event.target.dataset.path, "POST"); } catch (error) { put(byId("service"), error.message); }
    event.target.disabled = false;
    await refresh();
  });
  rows.set(id, row);
  return row;
}

function fill(row, job) {
  const part = (name) => row.querySelector(`.${name}`);
  part("state").className = `state ${job.state}`;
  put(part("icon"), ICONS[job.state] ?? "?");
  put(part("word"), job.attempt > 1 ? `${job.state} (attempt ${job.attempt})` : job.state);
  const bar = row.querySelector("progress");
  bar.hidden = !job.progress || !LIVE.has(job.state);
  if (job.progress) bar.value = job.progress.bytes_done / (job.progress.bytes_total || 1);
  put(part("amount"), job.result ? size(job.result.bytes) : amount(job.progress));
  put(part("destination"), job.destination);
  put(part("source"), `from ${job.source}`);
  put(part("error"), job.error ? job.error.message : "");
  put(part("hint"), job.error ? job.error.hint : "");
  put(part("created"), new Date(job.created_at).toLocaleString());
  const action = job.links.cancel ? "cancel" : "retry";
  const button = part("act");
  button.hidden = !job.links[action];
  button.dataset.path = job.links[action] ?? "";
  put(button, action);
  button.setAttribute("aria-label", `${action} the job for ${job.destination}`);
}

function show(jobs, more) {
  const body = byId("jobs").tBodies[0];
  jobs.forEach((job, place) => {
    const row = rows.get(job.id) ?? newRow(job.id);
    fill(row, job);
    if (body.rows[place] !== row) body.insertBefore(row, body.rows[place] ?? null);
  });
  while (body.rows.length > jobs.length) body.rows[jobs.length].remove();
  byId("jobs").hidden = jobs.length === 0;
  byId("empty").hidden = jobs.length > 0;
  byId("more").hidden = !more;
}

async function loadJobs() {
  const jobs = [];
  let cursor = null;
  for (let page = 0; page < pages; page += 1) {
    const query = cursor ? `&cursor=${encodeURIComponent(cursor)}` : "";
    const answer = await call(`/v1/jobs?limit=50${query}`);
    jobs.push(...answer.items);
    cursor = answer.next_cursor;
    if (!cursor) break;
  }
  byId("login").hidden = true;
  show(jobs, Boolean(cursor));
}

async function loadReadiness() {
  const { ready, parts } = await call("/readyz");
  const missing = Object.entries(parts).filter(([, part]) => part.state !== "ok");
  const told = missing.map(([name, part]) => `${name}: ${part.state}${part.detail ? `, ${part.detail}` : ""}`);
  put(byId("service"), ready ? "ready" : told.join("; "));
}

async function refresh() {
  try {
    await loadReadiness();
    await loadJobs();
  } catch (error) {
    put(byId("service"), error instanceof TypeError ? "the service does not answer" : error.message);
  }
}

byId("command").textContent =
  `unshard submit /path/to/checkpoint /path/to/model --server ${location.origin}`;
byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", byId("token").value);
  refresh();
});
byId("more").addEventListener("click", () => { pages += 1; refresh(); });

async function loop() {
  if (!document.hidden) await refresh();
  setTimeout(loop, POLL_MS);
}
loop();
