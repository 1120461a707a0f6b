// Asks the server every few seconds for the blocks that have changed, and replaces them. Follows showValues of jaxdp.report.
const SECONDS = 2;
const connection = document.getElementById("connection"), announcement = document.getElementById("announcement");
const focusable = root => [...root.querySelectorAll("a, button, summary, [tabindex]")];
const wide = root => [...root.querySelectorAll(".wide")];

function prepare(root) {
  showValues(root);
  for (const box of wide(root)) if (box.scrollWidth > box.clientWidth && !focusable(box).length) {
    box.tabIndex = 0;
    box.setAttribute("role", "group");
    const name = box.querySelector("img")?.alt ?? `${box.closest("section").querySelector("h2").textContent}: table`;
    box.setAttribute("aria-label", `${name}, scrolls sideways`);
  }
}

async function replace(block, html, digest) {
  if (block.querySelector("output:not([hidden])")) return;  // someone reads a value; the next request asks again
  const next = document.createElement("div");
  next.innerHTML = html;
  await Promise.allSettled([...next.querySelectorAll("img")].map(image => image.decode()));  // without flicker
  const focused = focusable(block).indexOf(document.activeElement), scrolled = wide(block).map(box => box.scrollLeft);
  block.replaceChildren(...next.childNodes);
  block.dataset.digest = digest;
  block.parentElement.hidden = !html;
  wide(block).forEach((box, number) => box.scrollLeft = scrolled[number] ?? 0);
  prepare(block);
  focusable(block)[focused]?.focus({preventScroll: true});
}

async function update() {
  const blocks = [...document.querySelectorAll(".block")];
  const response = await fetch("blocks?have=" + blocks.map(block => block.dataset.digest).join(","), {
    signal: AbortSignal.timeout(120_000),
  });
  if (!response.ok) throw new Error(await response.text());
  const state = await response.json();
  document.title = state.title;
  if (announcement.textContent !== state.announcement) announcement.textContent = state.announcement;
  for (const block of blocks) {
    const changed = state.blocks[block.id];
    if (changed) await replace(block, changed.html, changed.digest);
  }
}

async function loop() {
  if (!document.hidden) {
    let problem = "";
    await update().catch(error => problem = error.message.startsWith("jaxdp") ? error.message : "jaxdp watch does not answer; this page shows its last state.");
    if (connection.textContent !== problem) connection.textContent = problem;
  }
  setTimeout(loop, 1000 * SECONDS);
}

if (location.search) history.replaceState(null, "", location.pathname);  // the cookie has the token now
prepare(document);
loop();
