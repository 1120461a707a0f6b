// Values on hover: shows the nearest point's value at once, also on touch screens; arrow keys move along a curve and between
// curves. Without JavaScript, browsers show the titles of the points themselves.
function showValues(root) {
  for (const plot of root.querySelectorAll(".plot:has(svg)")) {
    const svg = plot.querySelector("svg"), tip = plot.querySelector("output"), points = [...svg.querySelectorAll("circle")];
    const texts = new Map(points.map(point => [point, point.textContent]));
    const curves = [...svg.querySelectorAll("g")].map(group => [...group.children]);
    points.forEach(point => point.replaceChildren());
    let shown = null;
    const scale = () => svg.viewBox.baseVal.width / svg.getBoundingClientRect().width;
    const show = point => {
      if (point === shown) return;
      shown?.removeAttribute("class");
      tip.hidden = !(shown = point);
      if (!point) return;
      point.setAttribute("class", "shown");
      tip.textContent = texts.get(point);
      const x = point.cx.baseVal.value / scale(), y = point.cy.baseVal.value / scale();
      tip.style.left = `${Math.max(0, Math.min(x - tip.offsetWidth / 2, plot.clientWidth - tip.offsetWidth))}px`;
      tip.style.top = `${y * scale() < 60 ? y + 12 : y - tip.offsetHeight - 12}px`;
    };
    const find = event => {
      const box = svg.getBoundingClientRect();
      const x = (event.clientX - box.left) * scale(), y = (event.clientY - box.top) * scale();
      let nearest = null, least = 40;
      for (const point of points) {
        const distance = Math.hypot(point.cx.baseVal.value - x, point.cy.baseVal.value - y);
        if (distance < least) [nearest, least] = [point, distance];
      }
      show(nearest);
    };
    const move = event => {
      const across = {ArrowLeft: -1, ArrowRight: 1}[event.key], between = {ArrowUp: -1, ArrowDown: 1}[event.key];
      if (event.key === "Escape") return show(null);
      if (!(across || between) || !curves.length || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      const at = curves.findIndex(curve => curve.includes(shown)), curve = curves[at];
      let next = curves[0].at(-1);
      if (curve && across) next = curve[Math.max(0, Math.min(curve.indexOf(shown) + across, curve.length - 1))];
      if (curve && between) next = curves[(at + between + curves.length) % curves.length].at(-1);
      show(next);
    };
    plot.addEventListener("pointerleave", () => show(null));
    plot.addEventListener("pointermove", find);
    plot.addEventListener("pointerdown", find);
    plot.addEventListener("keydown", move);
    plot.addEventListener("blur", () => show(null));
    plot.tabIndex = 0;
    plot.setAttribute("role", "group");
    plot.setAttribute("aria-label", `${plot.querySelector("img").alt}; arrow keys show the values`);
  }
}

// Of a page that `jaxdp watch` serves: asks every few seconds for the page, and replaces the sections that have changed.
const SECONDS = 2;
const focusable = root => [...root.querySelectorAll("a, button, summary, [tabindex]")];
const wide = root => [...root.querySelectorAll(".wide")];
const received = new Map();  // the HTML of the sections as it came, by id
let etag = "";

function prepare(root) {
  showValues(root);
  for (const box of wide(root)) if (box.scrollWidth > box.clientWidth) {
    box.tabIndex = 0;
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", `${box.closest("section").querySelector("h2").textContent}: table, scrolls sideways`);
  }
}

async function replace(old, next) {
  await Promise.allSettled([...next.querySelectorAll("img")].map(image => image.decode()));  // without flicker
  const focused = focusable(old).indexOf(document.activeElement), scrolled = wide(old).map(box => box.scrollLeft);
  const html = next.outerHTML;
  old.replaceWith(next);
  received.set(next.id, html);
  wide(next).forEach((box, number) => box.scrollLeft = scrolled[number] ?? 0);
  prepare(next);
  focusable(next)[focused]?.focus({preventScroll: true});
}

async function update() {
  const headers = etag ? {"If-None-Match": etag} : {};
  const response = await fetch("/", {headers, cache: "no-store", signal: AbortSignal.timeout(120_000)});
  if (response.status === 304) return;
  if (!response.ok) throw new Error(await response.text());
  const next = new DOMParser().parseFromString(await response.text(), "text/html");
  document.title = next.title;
  const said = document.getElementById("announcement"), says = next.getElementById("announcement");
  if (said.textContent !== says.textContent) said.textContent = says.textContent;
  document.querySelector("footer").textContent = next.querySelector("footer").textContent;
  const main = document.querySelector("main");
  let complete = true;
  const sections = [...next.querySelectorAll("section")], ids = new Set(sections.map(section => section.id));
  for (const old of [...main.children]) if (!ids.has(old.id)) old.remove();
  for (const section of sections) {
    const old = document.getElementById(section.id);
    if (!old) {  // in the order of the page
      const after = [...main.children].find(child => +child.id.split("-")[1] > +section.id.split("-")[1]) ?? null;
      const html = section.outerHTML;
      main.insertBefore(section, after);
      received.set(section.id, html);
      prepare(section);
    } else if (received.get(section.id) !== section.outerHTML) {
      if (old.querySelector("output:not([hidden])")) complete = false;  // someone reads a value
      else await replace(old, section);
    }
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

for (const section of document.querySelectorAll("section")) received.set(section.id, section.outerHTML);
prepare(document);
if (location.protocol.startsWith("http") && document.documentElement.dataset.follow !== undefined) {
  if (location.search) history.replaceState(null, "", location.pathname);  // the cookie has the token now
  follow();
}
