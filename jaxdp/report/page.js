// Values on hover: shows the nearest point's value at once, also on touch screens. Without JavaScript, browsers show the titles
// of the points themselves.
function showValues(root) {
  for (const plot of root.querySelectorAll(".plot:has(svg)")) {
    const svg = plot.querySelector("svg"), tip = plot.querySelector("output"), points = [...svg.querySelectorAll("circle")];
    const texts = new Map(points.map(point => [point, point.textContent]));
    points.forEach(point => point.replaceChildren());
    let shown = null;
    const show = (point, scale) => {
      if (point === shown) return;
      shown?.removeAttribute("class");
      tip.hidden = !(shown = point);
      if (!point) return;
      point.setAttribute("class", "shown");
      tip.textContent = texts.get(point);
      const x = point.cx.baseVal.value / scale, y = point.cy.baseVal.value / scale;
      tip.style.left = `${Math.max(0, Math.min(x - tip.offsetWidth / 2, plot.clientWidth - tip.offsetWidth))}px`;
      tip.style.top = `${y * scale < 60 ? y + 12 : y - tip.offsetHeight - 12}px`;
    };
    const find = event => {
      const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
      const x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
      let nearest = null, least = 40;
      for (const point of points) {
        const distance = Math.hypot(point.cx.baseVal.value - x, point.cy.baseVal.value - y);
        if (distance < least) [nearest, least] = [point, distance];
      }
      show(nearest, scale);
    };
    plot.addEventListener("pointerleave", () => show(null));
    plot.addEventListener("pointermove", find);
    plot.addEventListener("pointerdown", find);
  }
}

// Of a page that `jaxdp watch` serves: asks every few seconds for the page, and replaces the sections that have changed.
const SECONDS = 2;
const wide = root => [...root.querySelectorAll(".wide")];
const received = new Map();  // the HTML of the sections as it came, by id
let etag = "";

function prepare(section) {
  showValues(section);
  for (const box of wide(section)) if (box.scrollWidth > box.clientWidth) {
    box.tabIndex = 0;
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", `${section.querySelector("h2").textContent}: table, scrolls sideways`);
  }
}

async function replace(old, next) {
  await Promise.allSettled([...next.querySelectorAll("img")].map(image => image.decode()));  // without flicker
  const focused = wide(old).indexOf(document.activeElement), scrolled = wide(old).map(box => box.scrollLeft);
  old.replaceWith(next);
  prepare(next);
  wide(next).forEach((box, number) => box.scrollLeft = scrolled[number] ?? 0);
  wide(next)[focused]?.focus({preventScroll: true});
}

async function update() {
  const headers = etag ? {"If-None-Match": etag} : {};
  const response = await fetch("/", {headers, cache: "no-store", signal: AbortSignal.timeout(120_000)});
  if (response.status === 304) return;
  if (!response.ok) throw new Error(await response.text());
  const next = new DOMParser().parseFromString(await response.text(), "text/html"), main = document.querySelector("main");
  document.title = next.title;
  for (const one of ["#announcement", "footer"]) {
    const said = document.querySelector(one), says = next.querySelector(one).textContent;
    if (said.textContent !== says) said.textContent = says;
  }
  const sections = [...next.querySelectorAll("section")], ids = new Set(sections.map(section => section.id));
  for (const old of [...main.children]) if (!ids.has(old.id)) old.remove();
  let complete = true;
  for (const [number, section] of sections.entries()) {
    const html = section.outerHTML;
    if (document.getElementById(section.id)?.querySelector("output:not([hidden])")) {  // somebody reads a value
      complete = false;
      continue;
    }
    if (received.get(section.id) === html && document.getElementById(section.id)) continue;
    if (main.children[number]?.id !== section.id) main.insertBefore(document.createElement("section"), main.children[number] ?? null);
    await replace(main.children[number], section);
    received.set(section.id, html);
  }
  etag = complete ? response.headers.get("ETag") : "";
}

async function follow() {
  if (!document.hidden) {
    const connection = document.getElementById("connection");
    let problem = "";
    await update().catch(error => problem = error.message.startsWith("jaxdp") ? error.message : "jaxdp watch does not answer; this page shows its last state.");
    if (connection.textContent !== problem) connection.textContent = problem;
  }
  setTimeout(follow, 1000 * SECONDS);
}

for (const section of document.querySelectorAll("section")) {
  received.set(section.id, section.outerHTML);
  prepare(section);
}
if (location.protocol.startsWith("http") && document.documentElement.dataset.follow !== undefined) {
  if (location.search) history.replaceState(null, "", location.pathname);  // the cookie has the token now
  follow();
}
